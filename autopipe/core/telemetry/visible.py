"""Which devices CUDA sees, and in which order: the rules of CUDA_VISIBLE_DEVICES, applied to UUIDs.

Rules (CUDA programming guide, "CUDA environment variables"): unset, all; empty, none; indices or UUIDs, of
which any unique prefix will do; the first entry that names no device ends the list; a device named twice
leaves none; with MIG, only the first instance is seen. The first entry decides whether the list is one of
indices, GPU or MIG names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PhysicalGpu:
    """A GPU as NVML lists it (its order is that of the PCI bus).

    Attributes:
        uuid: None when the GPU cannot be asked.
        mig: (UUID, GPU instance, compute instance) of each MIG device.
        mig_enabled: MIG mode is on, with or without instances.
    """

    uuid: str | None
    name: str = ""
    mig: tuple[tuple[str, int | None, int | None], ...] = ()
    mig_enabled: bool = False


@dataclass(frozen=True, slots=True)
class Visible:
    """A device CUDA sees: `gpu` is its NVML index, `mig` a place in that GPU's `mig`, None: the whole."""

    gpu: int
    mig: int | None = None


def visible_devices(value: str | None, gpus: Sequence[PhysicalGpu]) -> list[Visible]:
    """Apply CUDA_VISIBLE_DEVICES.

    Args:
        value: the variable, or None when unset.
        gpus: all GPUs in NVML's order.

    Returns:
        The devices in CUDA's order: the place in the list is CUDA's ordinal.
    """
    if value is None:
        return _expand(range(len(gpus)), gpus)
    entries = [entry.strip() for entry in value.split(",")]
    if entries[0].startswith("MIG-"):
        return _named_mig(entries[0], gpus)
    if entries[0].startswith("GPU-"):
        found = [_named_gpu(entry, gpus) for entry in entries]
    else:
        found = [_index(entry, len(gpus)) for entry in entries]
    chosen = []
    for index in found:
        if index is None:
            break
        chosen.append(index)
    if len(set(chosen)) < len(chosen):
        return []
    return _expand(chosen, gpus)


def order_is_ambiguous(value: str | None, environment: Mapping[str, str], gpus: Sequence[PhysicalGpu]) -> bool:
    """Whether indices may mean other GPUs to CUDA than to NVML.

    CUDA counts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID; with GPUs of one model the orders
    agree.
    """
    named = value is not None and value.strip().startswith(("GPU-", "MIG-"))
    by_bus = environment.get("CUDA_DEVICE_ORDER", "").strip() == "PCI_BUS_ID"
    return not named and not by_bus and len({gpu.name for gpu in gpus if gpu.uuid is not None}) > 1


def uuids_from_torch() -> list[str] | None:
    """UUIDs (without `GPU-`) in CUDA's own order if PyTorch has started CUDA here, else None."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [str(found.uuid) for found in properties]
    except (AttributeError, RuntimeError):  # no uuid in this PyTorch, or CUDA is in trouble
        return None


def match_uuids(uuids: Sequence[str], gpus: Sequence[PhysicalGpu]) -> list[Visible] | None:
    """The devices with these UUIDs (with or without `GPU-`), in that order; None when one is not known."""
    known = {}
    for index, gpu in enumerate(gpus):
        if gpu.uuid is not None:
            known[_bare(gpu.uuid)] = Visible(index)
        for position, (uuid, _, _) in enumerate(gpu.mig):
            known[_bare(uuid)] = Visible(index, position)
    found = [known.get(_bare(uuid)) for uuid in uuids]
    devices = [device for device in found if device is not None]
    return devices if len(devices) == len(found) else None


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def _index(entry: str, count: int) -> int | None:
    """Like C's strtol: leading digits count (`1x` is 1), anything else is no device."""
    digits = entry[: len(entry) - len(entry.lstrip("0123456789"))]
    return int(digits) if digits and int(digits) < count else None


def _named_gpu(prefix: str, gpus: Sequence[PhysicalGpu]) -> int | None:
    if not prefix.startswith("GPU-"):
        return None
    found = [index for index, gpu in enumerate(gpus) if gpu.uuid is not None and gpu.uuid.startswith(prefix)]
    return found[0] if len(found) == 1 else None


def _named_mig(entry: str, gpus: Sequence[PhysicalGpu]) -> list[Visible]:
    """`MIG-UUID` (a prefix will do) or, of old, `MIG-GPU-UUID/GPU instance/compute instance`."""
    found = []
    for index, gpu in enumerate(gpus):
        for position, (uuid, gpu_instance, compute_instance) in enumerate(gpu.mig):
            old_name = f"MIG-{gpu.uuid}/{gpu_instance}/{compute_instance}"
            if uuid.startswith(entry) or old_name == entry:
                found.append(Visible(index, position))
    return found if len(found) == 1 else []


def _expand(indices: Sequence[int], gpus: Sequence[PhysicalGpu]) -> list[Visible]:
    """Whole GPUs, or of a GPU in MIG mode its first instance (CUDA opens no other)."""
    devices = []
    for index in indices:
        if not gpus[index].mig_enabled:
            devices.append(Visible(index))
        elif gpus[index].mig:
            devices.append(Visible(index, 0))
    return devices
