"""What the devices did during a stretch of time, such as a request: energy, and figures over the samples in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from autopipe.core.telemetry.energy import EnergyUse
from autopipe.core.telemetry.snapshot import DeviceInfo, DeviceSnapshot, ThrottleReason

if TYPE_CHECKING:
    from autopipe.core.telemetry.sampler import Sampler

MEANS = (
    "utilisation",
    "power_w",
    "clock_mhz",
    "sm_utilisation",
    "sm_occupancy",
    "dram_bandwidth_utilisation",
    "nvlink_tx_bytes_per_s",
    "nvlink_rx_bytes_per_s",
    "pcie_tx_bytes_per_s",
    "pcie_rx_bytes_per_s",
)
"""Figures of `DeviceUse` that are means."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device during a stretch of time. Figures are means over its samples, unless it says otherwise.

    Attributes:
        num_samples: readings in that time; 0 when it was shorter than the sampling interval: the figures are
            then those of the newest reading.
        error: why the device could not be read at the end, else None.
        memory_used_bytes: the most.
        temperature_c: the highest.
        throttle_reasons: all that were met, in order; None when the device does not tell.
        energy_j: all energy of the device in that time, whoever caused it; None without an energy counter.
    """

    device: DeviceInfo
    num_samples: int = 0
    error: str | None = None
    utilisation: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    throttle_reasons: tuple[ThrottleReason, ...] | None = None
    sm_utilisation: float | None = None
    sm_occupancy: float | None = None
    dram_bandwidth_utilisation: float | None = None
    nvlink_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    pcie_rx_bytes_per_s: float | None = None
    energy_j: float | None = None
    j_per_token: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every attribute, `device` as its label, with `name` and `kind`; a missing figure is null."""
        reasons = self.throttle_reasons
        return {
            "device": self.device.label,
            "name": self.device.name,
            "kind": self.device.kind.value,
            **{key: value for key, value in asdict(self).items() if key != "device"},
            "throttle_reasons": None if reasons is None else [reason.value for reason in reasons],
        }


@dataclass(frozen=True, slots=True)
class TelemetryUse:
    """Energy and devices of a stretch of time, and sources that are not there (a line each)."""

    energy: EnergyUse
    devices: tuple[DeviceUse, ...] = ()
    problems: tuple[str, ...] = ()


class UseMeter:
    """Measures from its creation to `stop`. Neither waits for hardware.

    Args:
        now: the clock of the sampler's readings.
    """

    def __init__(self, sampler: Sampler, now: Callable[[], float] = time.monotonic) -> None:
        self._sampler = sampler
        self._now = now
        self._start_s = now()
        self._energy = sampler.measure_energy()

    def stop(self, num_tokens: int, start_s: float | None = None, end_s: float | None = None) -> TelemetryUse:
        """What happened so far; may be called again.

        Args:
            num_tokens: tokens emitted in that time.
            start_s, end_s: count from then and until then only; on the clock of `time.monotonic()`, within the
                time since the meter was made.
        """
        energy = self._energy.stop(num_tokens, start_s, end_s)
        since_s = self._start_s if start_s is None else start_s
        until_s = self._now() if end_s is None else end_s
        by_id = {found.device.id: found.energy_j for found in energy.devices}
        devices = []
        for info, readings in self._sampler.readings_since(since_s):
            use = summarise(info, readings, since_s, until_s)
            joules = by_id.get(info.id)
            per_token = joules / num_tokens if joules is not None and num_tokens > 0 else None
            devices.append(replace(use, energy_j=joules, j_per_token=per_token))
        return TelemetryUse(energy, tuple(devices), self._sampler.snapshot().problems)


def summarise(device: DeviceInfo, readings: Sequence[DeviceSnapshot], start_s: float, end_s: float) -> DeviceUse:
    """Figures of one device between two moments.

    Args:
        readings: oldest first, one or more; where none lies between the two moments, the last one counts.
    """
    inside = [reading for reading in readings if start_s <= reading.time_s <= end_s]
    counted = inside or [readings[-1]]
    means: dict[str, Any] = {figure: _mean(getattr(reading, figure) for reading in counted) for figure in MEANS}
    used = [reading.memory_used_bytes for reading in counted if reading.memory_used_bytes is not None]
    temperatures = [reading.temperature_c for reading in counted if reading.temperature_c is not None]
    reasons = [reading.throttle_reasons for reading in counted if reading.throttle_reasons is not None]
    return DeviceUse(
        device,
        num_samples=len(inside),
        error=counted[-1].error,
        memory_used_bytes=max(used, default=None),
        memory_total_bytes=next((r.memory_total_bytes for r in reversed(counted) if r.memory_total_bytes), None),
        temperature_c=max(temperatures, default=None),
        throttle_reasons=tuple(dict.fromkeys(reason for met in reasons for reason in met)) if reasons else None,
        **means,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
