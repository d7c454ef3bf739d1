"""What a machine offers: devices, links, published latency curves. From YAML, from `8xH100`, or from this machine."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from autopipe.core.affinity import usable_cores
from autopipe.core.config import UserModel, load_yaml
from autopipe.core.errors import ConfigError
from autopipe.core.plan import Dtype

_log = logging.getLogger(__name__)

GIB = 1 << 30
MAX_DEVICES = 64

Positive = Annotated[float, Field(gt=0)]


class DeviceKind(UserModel):
    """One kind of device, by its data sheet.

    Attributes:
        memory_gib: as the driver reports it; of the machine one is on, what is free.
        gb_per_s: peak memory bandwidth, 10^9 bytes a second.
        tflops: peak dense 10^12 operations a second by dtype; a dtype that is missing computes as bf16.
        context_gib: a process takes before any weights (CUDA context, library workspaces).
    """

    memory_gib: Positive
    gb_per_s: Positive
    tflops: dict[Dtype, Positive] = Field(min_length=1)
    context_gib: float = Field(default=0.6, ge=0)
    is_cpu: bool = False


def _gpu(memory_gib: float, gb_per_s: float, bf16: float, int8: float | None = None) -> DeviceKind:
    tflops = {Dtype.BF16: bf16, **({Dtype.INT8: int8} if int8 else {})}
    return DeviceKind(memory_gib=memory_gib, gb_per_s=gb_per_s, tflops=tflops)


# NVIDIA's and AMD's data sheets: dense figures (half of those "with sparsity"), SXM variants where there are several.
# GeForce: tensor cores with fp32 accumulation (Ada and Ampere GA102 architecture papers, appendix A).
KINDS: dict[str, DeviceKind] = {
    "T4": _gpu(15.0, 320, 65, 130),
    "V100-32GB": _gpu(32, 900, 125),
    "A10": _gpu(22.5, 600, 125, 250),
    "L4": _gpu(22.5, 300, 121, 242),
    "L40S": _gpu(45, 864, 362, 733),
    "A100-40GB": _gpu(40, 1555, 312, 624),
    "A100-80GB": _gpu(80, 2039, 312, 624),
    "H100": _gpu(80, 3350, 989, 1979),
    "H200": _gpu(140, 4800, 989, 1979),
    "B200": _gpu(179, 8000, 2250, 4500),
    "MI300X": _gpu(192, 5300, 1307, 2614),
    "RTX-3090": _gpu(24, 936, 71, 284),
    "RTX-4090": _gpu(24, 1008, 165, 660),
    "RTX-5090": _gpu(32, 1792, 209, 838),
}
_ALIASES = {
    "A100": "A100-40GB", "4090": "RTX-4090", "3090": "RTX-3090", "5090": "RTX-5090", "V100": "V100-32GB",
    "A100-SXM4-40GB": "A100-40GB", "A100-SXM4-80GB": "A100-80GB", "H100-80GB": "H100", "H100-SXM": "H100",
}  # fmt: skip
_NVLINK_GB_PER_S = {"V100-32GB": 150, "A100-40GB": 300, "A100-80GB": 300, "H100": 450, "H200": 450, "B200": 900}
"""One way, between two devices of one machine; NVIDIA quotes both ways together."""
_PCIE_GB_PER_S = 25.0
"""PCIe 4.0 x16: 32 less protocol overhead."""
_COUNTED = re.compile(r"(\d+)\s*[x×*]\s*([\w.-]+)", re.IGNORECASE)


class DeviceEntry(UserModel):
    """Devices in a hardware file: a kind of the table, or figures of one's own (all of them)."""

    kind: str = Field(min_length=1)
    count: int = Field(default=1, ge=1, le=MAX_DEVICES)
    memory_gib: Positive | None = None
    gb_per_s: Positive | None = None
    tflops: dict[Dtype, Positive] | None = None
    context_gib: float | None = Field(default=None, ge=0)
    is_cpu: bool | None = None


class LinkSpec(UserModel):
    """Between two devices: 10^9 bytes a second one way, and microseconds of a transfer of any size."""

    gb_per_s: Positive = _PCIE_GB_PER_S
    latency_us: float = Field(default=10.0, ge=0)


class Curve(UserModel):
    """Measured milliseconds of a model's forward by its number of tokens; other numbers as in `emulated` stages.

    Attributes:
        model: as `sizes.published_name` calls it.
        agreement: with the target of the same measurements, where it was measured too.
        interpolate: linear between the points; false: the largest point at or below a number counts.
        source: where the figures are from.
    """

    model: str = Field(min_length=1)
    dtype: Dtype = Dtype.AUTO
    interpolate: bool = False
    ms: dict[Annotated[int, Field(ge=1)], Positive] = Field(min_length=1)
    agreement: float | None = Field(default=None, ge=0, le=1)
    source: str = Field(min_length=1)


class Device(UserModel):
    """One device. `name` is torch's: `cpu`, `cuda:0`."""

    name: str
    kind: str
    spec: DeviceKind

    @property
    def memory_bytes(self) -> int:
        return int(self.spec.memory_gib * GIB)

    @property
    def context_bytes(self) -> int:
        return int(self.spec.context_gib * GIB)


class Hardware(UserModel):
    """A machine."""

    name: str
    devices: tuple[Device, ...] = Field(min_length=1, max_length=MAX_DEVICES)
    link: LinkSpec = LinkSpec()
    curves: tuple[Curve, ...] = ()

    def device(self, name: str) -> Device:
        return next(device for device in self.devices if device.name == name)


class HardwareFile(UserModel):
    """What a hardware file may say. `link`: `nvlink`, `pcie`, or figures; default: by the devices."""

    name: str | None = Field(default=None, min_length=1)
    devices: tuple[DeviceEntry, ...] = Field(min_length=1)
    link: LinkSpec | str | None = None
    curves: tuple[Curve, ...] = ()


def load_hardware(text: str, key: str = "--hardware") -> Hardware:
    """Hardware by name (`pipespec-4xA100`, `8xH100`, `2x4090+1xL4`, `cpu`), or from a YAML file.

    Raises:
        ConfigError: neither a file, nor a known kind.
    """
    if text == "cpu":
        return _on_this_machine([_local_cpu()])
    shipped = Path(__file__).parent / "data" / f"{text}.yaml"
    path = shipped if re.fullmatch(r"[\w.-]+", text) and shipped.is_file() else Path(text).expanduser()
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return parse_hardware(load_yaml(path, key), path.stem, key)
    entries = []
    for part in text.split("+"):
        found = _COUNTED.fullmatch(part.strip()) or re.fullmatch(r"()([\w.-]+)", part.strip())
        if found is None:
            raise ConfigError(key, text, f"COUNTxKIND, such as 8xH100, or a YAML file; kinds: {', '.join(KINDS)}")
        entries.append({"kind": found[2], "count": int(found[1] or 1)})
    return parse_hardware({"devices": entries}, text, key)


def parse_hardware(data: dict[str, Any], name: str, key: str = "--hardware") -> Hardware:
    """Hardware from the contents of a hardware file.

    Raises:
        ConfigError: a key or value in it that is not allowed, an unknown kind, or too many devices.
    """
    file = HardwareFile.parse(data, prefix=f"{key}: ")
    devices: list[Device] = []
    num_gpus = 0
    for index, entry in enumerate(file.devices):
        kind, spec = _spec(entry, f"{key}: devices.{index}")
        for _ in range(entry.count):
            devices.append(Device(name="cpu" if spec.is_cpu else f"cuda:{num_gpus}", kind=kind, spec=spec))
            num_gpus += not spec.is_cpu
    if not 1 <= len(devices) <= MAX_DEVICES:
        raise ConfigError(f"{key}: devices", len(devices), f"1 to {MAX_DEVICES} devices")
    if sum(device.spec.is_cpu for device in devices) > 1:
        raise ConfigError(f"{key}: devices", "several CPUs", "one `is_cpu` entry for all sockets together")
    link = _link(file.link, {device.kind for device in devices}, key)
    return Hardware(name=file.name or name, devices=tuple(devices), link=link, curves=file.curves)


def local_hardware() -> Hardware:
    """This machine: its GPUs if torch can use them (speed by the table), else its CPU.

    A device's memory is what is free on it now: what other programs hold is not ours to plan with, nor what a running
    engine holds, so plan before it starts. Asking a GPU makes a CUDA context there, which counts as taken and lasts as
    long as this process; a GPU without room even for that is left out. A CPU's bandwidth and speed are nominal figures;
    measure with `autopipe profile` for better ones.
    """
    return _on_this_machine(_local_gpus() or [_local_cpu()])


def _on_this_machine(devices: list[Device]) -> Hardware:
    return Hardware(name="this machine", devices=tuple(devices), link=LinkSpec())


def _local_cpu() -> Device:
    import psutil

    cores = usable_cores()
    spec = DeviceKind(
        memory_gib=psutil.virtual_memory().available / GIB,
        gb_per_s=min(16.0 * cores, 100.0),
        tflops={Dtype.BF16: 0.15 * cores},
        context_gib=CPU_PROCESS_BYTES / GIB,
        is_cpu=True,
    )
    return Device(name="cpu", kind=f"CPU, {cores} cores", spec=spec)


CPU_PROCESS_BYTES = 290_000_000
"""Of a stage's process on a CPU before any weights: interpreter, torch, transformers (see memory.py)."""


def _local_gpus() -> list[Device]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(min(torch.cuda.device_count(), MAX_DEVICES)):
        properties = torch.cuda.get_device_properties(index)
        try:
            free_bytes = torch.cuda.mem_get_info(index)[0]
        except RuntimeError as error:
            _log.warning("cuda:%d (%s) is left out: %s", index, properties.name, error)
            continue
        memory_gib = properties.total_memory / GIB
        known = [name for name in KINDS if name.split("-")[-1 if name.startswith("RTX") else 0] in properties.name]
        if not known:
            _log.warning("%s is not in the table of devices: its speed is taken for an A100's", properties.name)
        kind = min(known, key=lambda name: abs(KINDS[name].memory_gib - memory_gib), default="A100-40GB")
        devices.append(
            Device(
                name=f"cuda:{index}",
                kind=properties.name,
                spec=KINDS[kind].replace(memory_gib=max(free_bytes, 1) / GIB),
            )
        )
    return devices


def _spec(entry: DeviceEntry, key: str) -> tuple[str, DeviceKind]:
    canonical = {name.lower(): name for name in KINDS} | {name.lower(): kind for name, kind in _ALIASES.items()}
    kind = canonical.get(entry.kind.lower())
    given = entry.model_dump(exclude={"kind", "count"}, exclude_none=True)
    if kind is not None:
        return kind, KINDS[kind].replace(**given)
    missing = [name for name in ("memory_gib", "gb_per_s", "tflops") if name not in given]
    if missing:
        raise ConfigError(
            f"{key}.kind", entry.kind, f"{', '.join(KINDS)}; or any name with {', '.join(missing)} given as well"
        )
    return entry.kind, DeviceKind.parse(given, prefix=f"{key}.")


def _link(link: LinkSpec | str | None, kinds: set[str], key: str) -> LinkSpec:
    if isinstance(link, LinkSpec):
        return link
    rates = [_NVLINK_GB_PER_S.get(kind) for kind in kinds]
    if link not in (None, "nvlink", "pcie"):
        raise ConfigError(f"{key}: link", link, "nvlink, pcie, or {gb_per_s, latency_us}")
    if link == "pcie" or None in rates:
        if link == "nvlink":
            raise ConfigError(f"{key}: link", link, f"nvlink for {', '.join(_NVLINK_GB_PER_S)}; else give gb_per_s")
        return LinkSpec()
    return LinkSpec(gb_per_s=float(min(rate for rate in rates if rate is not None)))
