"""What telemetry reports: frozen snapshots in SI units. A figure that is not known is None, never 0.

Time stamps are `time.monotonic()` seconds: they may be subtracted from each other, and mean nothing
elsewhere. Shares (utilisation, occupancy) run from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any


class DeviceKind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"
    MIG = "mig"
    """A slice of a GPU (NVIDIA Multi-Instance GPU)."""
    OTHER = "other"


class ThrottleReason(StrEnum):
    """Why a device runs below its highest clock (NVML's clocks event reasons)."""

    IDLE = "idle"
    CLOCKS_SETTING = "clocks_setting"
    POWER_CAP = "power_cap"
    HARDWARE_SLOWDOWN = "hardware_slowdown"
    SYNC_BOOST = "sync_boost"
    SOFTWARE_THERMAL = "software_thermal"
    HARDWARE_THERMAL = "hardware_thermal"
    POWER_BRAKE = "power_brake"
    DISPLAY_CLOCK = "display_clock"
    BOARD_LIMIT = "board_limit"
    RELIABILITY = "reliability"
    OTHER = "other"
    """A reason newer than this list."""


_NOT_A_FAULT = {ThrottleReason.IDLE, ThrottleReason.CLOCKS_SETTING, ThrottleReason.DISPLAY_CLOCK}


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Who a device is; the same in every reading of one source.

    Attributes:
        id: unique and stable: `cpu`, or a GPU's UUID (`GPU-…`, `MIG-…`).
        ordinal: CUDA's number (`cuda:ordinal`) under CUDA_VISIBLE_DEVICES; None when CUDA does not see the device.
        parent_id: of a MIG device, the UUID of its GPU.
    """

    id: str
    kind: DeviceKind
    name: str
    ordinal: int | None = None
    parent_id: str | None = None

    @property
    def label(self) -> str:
        """As PyTorch says it: `cpu`, `cuda:0`; else the id."""
        if self.kind is DeviceKind.CPU:
            return "cpu"
        return self.id if self.ordinal is None else f"cuda:{self.ordinal}"


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """A running total of energy.

    Attributes:
        total_j: joules since some moment in the past; never falls, wrap-around is already undone.
        epoch: grows when the total lost its thread (counter reset, a gap); totals of two epochs are not
            comparable.
    """

    total_j: float
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """One CPU core (a hardware thread)."""

    utilisation: float | None = None
    clock_mhz: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """One reading of one device.

    Attributes:
        time_s: when, `time.monotonic()`.
        error: why the device could not be read at all (all figures are None then), else None.
        utilisation: share of time the device was busy.
        memory_utilisation: share of time its memory was being read or written.
        power_w: electrical power now.
        energy: from the device's own counter.
        energy_estimate: power samples integrated by the sampler; much coarser than a counter.
        clock_mhz: of the compute units; CPU: mean over cores.
        throttle_reasons: empty when the device runs freely.
        nvlink_tx_bytes_per_s: all links together, since the last reading; also `nvlink_rx_…`, `pcie_…`.
        sm_utilisation: share of multiprocessors busy (GPM).
        sm_occupancy: active warps to the most possible (GPM).
        dram_bandwidth_utilisation: memory bandwidth used to the most possible (GPM).
        cores: CPU only.
    """

    device: DeviceInfo
    time_s: float
    error: str | None = None
    utilisation: float | None = None
    memory_utilisation: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy: EnergyCounter | None = None
    energy_estimate: EnergyCounter | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: tuple[ThrottleReason, ...] | None = None
    nvlink_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    pcie_rx_bytes_per_s: float | None = None
    sm_utilisation: float | None = None
    sm_occupancy: float | None = None
    dram_bandwidth_utilisation: float | None = None
    cores: tuple[CoreSnapshot, ...] | None = None

    @property
    def memory_share(self) -> float | None:
        """Used to total memory."""
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return None
        return self.memory_used_bytes / self.memory_total_bytes

    @property
    def throttled(self) -> bool | None:
        """Whether something slows the device against its will (power, heat, hardware); idling is not that."""
        if self.throttle_reasons is None:
            return None
        return any(reason not in _NOT_A_FAULT for reason in self.throttle_reasons)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every attribute; a missing figure is null."""
        return {name: _plain(getattr(self, name)) for name in _names(self)}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The newest reading of every device (each has a time stamp of its own).

    Attributes:
        time_s: when they were put together.
        devices: in the order of the sources, and of CUDA within them.
        problems: sources that are not there, one clear line each.
    """

    time_s: float
    devices: tuple[DeviceSnapshot, ...] = ()
    problems: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[DeviceSnapshot]:
        return iter(self.devices)

    def get(self, device: str) -> DeviceSnapshot | None:
        """The device with this id or label (`cpu`, `cuda:0`, `GPU-…`), or None."""
        return next((found for found in self.devices if device in (found.device.id, found.device.label)), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "time_s": self.time_s,
            "devices": [device.to_dict() for device in self.devices],
            "problems": list(self.problems),
        }


def _names(value: Any) -> list[str]:
    return [field.name for field in fields(value)]


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, DeviceInfo | EnergyCounter | CoreSnapshot):
        return {name: _plain(getattr(value, name)) for name in _names(value)}
    return value
