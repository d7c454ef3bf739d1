"""Which stage goes where: the target first, drafters on devices of their own while there are any.

A stage stays on as few devices as it fits: its layers run one after another, so more devices do not make one sequence
faster. No device is filled by models beyond `share` (80%) of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopipe.core.errors import PlacementError
from autopipe.core.placement.hardware import Device, Hardware
from autopipe.core.placement.latency import Latency, Part, head_index, part_seconds, stage_latency
from autopipe.core.placement.memory import (
    MAX_SHARE,
    MemoryUse,
    gigabytes,
    kv_bytes_per_token,
    memory_use,
    weight_bytes,
)
from autopipe.core.placement.sizes import ModelSizes
from autopipe.core.plan import BackendName, Dtype


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stage to be placed. `dtype` is not `auto`."""

    name: str
    sizes: ModelSizes
    dtype: Dtype = Dtype.BF16
    backend: BackendName = BackendName.AUTO


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Where a stage is. Parts are in the order of its layers."""

    candidate: Candidate
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        return self.candidate.name

    def memory(self, context: int) -> dict[str, MemoryUse]:
        """Bytes by name of device."""
        return {
            part.device.name: _part_memory(self.candidate, part, context, index, len(self.parts))
            for index, part in enumerate(self.parts)
        }

    def layers(self) -> list[Device]:
        """The device of each layer."""
        return [part.device for part in self.parts for _ in range(part.num_layers)]

    def shares(self, context: int) -> dict[str, float]:
        """The share of a step's time that is spent on each device."""
        c = self.candidate
        head = self.parts[head_index(c.sizes, len(self.parts))]
        seconds: dict[str, float] = {}
        for part in self.parts:
            took = part_seconds(c.sizes, c.dtype, part, 1, context, len(self.parts) == 1, part is head)
            seconds[part.device.name] = seconds.get(part.device.name, 0.0) + took
        whole = sum(seconds.values())
        return {name: value / whole for name, value in seconds.items()}


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages of a chain, cheapest drafter first, the target last, on a machine's devices.

    Attributes:
        context: longest sequence in tokens.
        share: most of a device's memory that was to be used.
        notes: why something is as it is, in words.
    """

    hardware: Hardware
    stages: tuple[StagePlacement, ...]
    context: int
    share: float = MAX_SHARE
    notes: tuple[str, ...] = ()

    def budget(self, device: Device) -> int:
        """Bytes of a device that models may take."""
        return int(self.share * device.memory_bytes)

    def used(self, device: Device) -> int:
        """Bytes of a device that are taken."""
        return sum(
            use.total for stage in self.stages for n, use in stage.memory(self.context).items() if n == device.name
        )

    def free(self, device: Device) -> int:
        return self.budget(device) - self.used(device)

    def overfull(self) -> list[Device]:
        """Devices that hold more than they may."""
        return [device for device in self.hardware.devices if self.free(device) < 0]

    def latency(self, stage: StagePlacement) -> Latency:
        c = stage.candidate
        return stage_latency(c.sizes, c.dtype, c.backend, stage.parts, self.hardware, context=self.context)

    def contention(self) -> list[list[float]]:
        """How much slower stage i's forward is while stage j computes, [i][j]: a shared device is shared fairly."""
        shares = [stage.shares(self.context) for stage in self.stages]
        return [
            [
                1.0 if i == j else 1.0 + sum(mine.get(name, 0.0) * share for name, share in other.items())
                for j, other in enumerate(shares)
            ]
            for i, mine in enumerate(shares)
        ]


def place(
    hardware: Hardware, candidates: Sequence[Candidate], *, context: int = 4096, share: float = MAX_SHARE
) -> Placement:
    """Place a chain.

    Args:
        candidates: cheapest drafter first, the target last.
        context: longest sequence in tokens, for which every KV cache has room.

    Raises:
        PlacementError: a stage does not fit; the message has the numbers, and what would fit.
    """
    placed: dict[str, StagePlacement] = {}
    notes: list[str] = []
    for candidate in reversed(candidates):  # the target first, then the strongest drafter
        so_far = Placement(hardware, tuple(placed.values()), context, share)
        found = _find(so_far, candidate)
        if found is None:
            raise PlacementError(_explain(so_far, candidate, hardware))
        placed[candidate.name] = found
        notes.extend(_notes(so_far, found))
    return Placement(hardware, tuple(placed[candidate.name] for candidate in candidates), context, share, tuple(notes))


def _find(so_far: Placement, candidate: Candidate) -> StagePlacement | None:
    """The fewest devices that hold it, empty ones first; of several, those that are fastest for it."""
    empty = [device for device in so_far.hardware.devices if so_far.used(device) == 0]
    for devices in (empty, list(so_far.hardware.devices)):
        ranked = sorted(devices, key=lambda device: (-device.spec.gb_per_s, -so_far.free(device)))
        for count in range(1, len(ranked) + 1):
            found = _best_of(so_far, candidate, ranked, count)
            if found is not None:
                return found
    return None


def _best_of(so_far: Placement, candidate: Candidate, ranked: list[Device], count: int) -> StagePlacement | None:
    """`count` devices: the first in the ranking that will do, in any stretch of it."""
    if count > candidate.sizes.num_layers:
        return None
    for start in range(len(ranked) - count + 1):
        chosen = sorted(ranked[start : start + count], key=so_far.hardware.devices.index)
        found = StagePlacement(candidate, _split(so_far, candidate, chosen))
        if not replace(so_far, stages=(*so_far.stages, found)).overfull():
            return found
    return None


def _split(so_far: Placement, candidate: Candidate, devices: Sequence[Device]) -> tuple[Part, ...]:
    """Layers over devices, in proportion to the memory left beside embedding and head."""
    n = candidate.sizes.num_layers
    if len(devices) == 1:
        return (Part(devices[0], n),)
    room = []
    for index, device in enumerate(devices):
        bare = _part_memory(candidate, Part(device, 0), so_far.context, index, len(devices))
        room.append(max(0, so_far.free(device) - bare.total))
    whole = sum(room) or 1
    ends = [round(n * sum(room[: index + 1]) / whole) for index in range(len(devices))]
    ends[-1] = n
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(Part(device, count) for device, count in zip(devices, counts, strict=True) if count > 0)


def _part_memory(candidate: Candidate, part: Part, context: int, index: int, count: int) -> MemoryUse:
    """Bytes of part `index` of `count`."""
    return memory_use(
        candidate.sizes,
        candidate.dtype,
        part.device,
        context=context,
        layers=part.num_layers,
        has_embedding=index == 0,
        has_head=index == head_index(candidate.sizes, count),
    )


def _notes(so_far: Placement, found: StagePlacement) -> list[str]:
    notes = []
    if len(found.parts) > 1:
        notes.append(f"{found.name} is spread over {len(found.parts)} devices: it does not fit one")
    for part in found.parts:
        if part.device.spec.is_cpu:
            continue
        others = [s.name for s in so_far.stages if any(p.device.name == part.device.name for p in s.parts)]
        if others:
            notes.append(f"{found.name} shares {part.device.name} with {', '.join(others)}: no device is left empty")
    return notes


def _explain(so_far: Placement, candidate: Candidate, hardware: Hardware) -> str:
    """Why a stage does not fit, and in which dtype it would."""
    sizes, first = candidate.sizes, hardware.devices[0]
    need = memory_use(sizes, candidate.dtype, first, context=so_far.context)
    lines = [
        f"{candidate.name} ({candidate.dtype.value}) does not fit: it needs {gigabytes(need.total)}: "
        f"weights {gigabytes(need.weights)}, KV cache {gigabytes(need.kv)} ({so_far.context} tokens of "
        f"{gigabytes(kv_bytes_per_token(sizes, candidate.dtype))}), activations {gigabytes(need.activations)}, and "
        f"{gigabytes(need.process)} per process"
    ]
    for device in hardware.devices:
        taken = so_far.used(device)
        left = f", {gigabytes(taken)} taken by {_takers(so_far, device)}" if taken else ""
        lines.append(
            f"{device.name} ({device.kind}): {gigabytes(so_far.budget(device))} "
            f"({so_far.share:.0%} of {gigabytes(device.memory_bytes)}){left}"
        )
    smaller = [Dtype.BF16, Dtype.INT8, Dtype.INT4]
    now = weight_bytes(sizes, candidate.dtype, on_cpu=first.spec.is_cpu)
    for dtype in smaller:
        if weight_bytes(sizes, dtype, on_cpu=first.spec.is_cpu) >= now:
            continue
        found = _find(so_far, replace(candidate, dtype=dtype))
        if found is not None:
            lines.append(f"with dtype {dtype.value} it would fit on {', '.join(p.device.name for p in found.parts)}")
            break
    else:
        lines.append("it fits in no dtype: use a smaller model, a shorter --context, or more memory")
    return "\n  ".join(lines)


def _takers(so_far: Placement, device: Device) -> str:
    return ", ".join(s.name for s in so_far.stages if any(p.device.name == device.name for p in s.parts))
