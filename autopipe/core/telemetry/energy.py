"""Energy of a stretch of time, by device and per token, from samples taken every now and then.

The running total is interpolated at the beginning and the end, so that a request shorter than the sampling
interval gets its share of the interval instead of nothing. All energy of a device counts, whoever caused it:
requests that run at the same time share it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopipe.core.telemetry.snapshot import DeviceInfo, DeviceSnapshot, EnergyCounter

_LONGEST_POWER_GAP_S = 10.0


class PowerIntegral:
    """Integrates power samples (trapezoids) into a running total, for devices without an energy counter."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._total_j = 0.0
        self._epoch = 0

    def update(self, time_s: float, power_w: float | None) -> EnergyCounter | None:
        """Take a sample; None when there is no power figure. After a gap a new epoch begins."""
        last, self._last = self._last, None if power_w is None else (time_s, power_w)
        if power_w is None:
            self._epoch += last is not None
            return None
        if last is not None and time_s - last[0] <= _LONGEST_POWER_GAP_S:
            self._total_j += (time_s - last[0]) * (power_w + last[1]) / 2
        elif last is not None:
            self._epoch += 1
        return EnergyCounter(self._total_j, self._epoch)


def energy_between(
    samples: Sequence[tuple[float, EnergyCounter]], start_s: float, end_s: float, reach_s: float
) -> float | None:
    """Joules from `start_s` to `end_s`.

    Args:
        samples: (time, total) in order of time.
        reach_s: how far outside the samples the nearest slope may be followed.

    Returns:
        None with fewer than two samples, when they do not reach, or when the counter lost its thread in
        between.
    """
    if len(samples) < 2 or samples[0][1].epoch != samples[-1][1].epoch:
        return None
    if start_s < samples[0][0] - reach_s or end_s > samples[-1][0] + reach_s:
        return None
    return max(0.0, _total_at(samples, end_s) - _total_at(samples, start_s))


def _total_at(samples: Sequence[tuple[float, EnergyCounter]], time_s: float) -> float:
    """Linear inside and, with the outermost slope, outside."""
    after = bisect_left(samples, time_s, key=lambda sample: sample[0])
    after = min(max(after, 1), len(samples) - 1)
    (time_a, a), (time_b, b) = samples[after - 1], samples[after]
    if time_b <= time_a:
        return b.total_j
    return a.total_j + (b.total_j - a.total_j) * (time_s - time_a) / (time_b - time_a)


@dataclass(frozen=True, slots=True)
class DeviceEnergy:
    """Energy of one device. `estimated`: from power samples, not from an energy counter."""

    device: DeviceInfo
    energy_j: float | None
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """Energy of a stretch of time.

    Attributes:
        num_tokens: tokens emitted in that time.
    """

    duration_s: float
    num_tokens: int
    devices: tuple[DeviceEnergy, ...] = ()

    @property
    def total_j(self) -> float | None:
        """Sum over the devices with a figure (see `missing`); None when there is none."""
        known = [device.energy_j for device in self.devices if device.energy_j is not None]
        return sum(known) if known else None

    @property
    def missing(self) -> tuple[str, ...]:
        """Labels of devices whose energy is not in the total."""
        return tuple(device.device.label for device in self.devices if device.energy_j is None)

    @property
    def estimated(self) -> bool:
        """Whether any part of the total comes from power samples."""
        return any(device.estimated for device in self.devices)

    @property
    def total_j_per_token(self) -> float | None:
        return self._per_token(self.total_j)

    @property
    def j_per_token(self) -> dict[str, float | None]:
        """Joules per token by device label; None where there is no counter, or no token."""
        return {device.device.label: self._per_token(device.energy_j) for device in self.devices}

    def _per_token(self, energy_j: float | None) -> float | None:
        return None if energy_j is None or self.num_tokens <= 0 else energy_j / self.num_tokens

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "duration_s": self.duration_s,
            "num_tokens": self.num_tokens,
            "total_j": self.total_j,
            "total_j_per_token": self.total_j_per_token,
            "energy_j": {found.device.label: found.energy_j for found in self.devices},
            "j_per_token": self.j_per_token,
            "missing": list(self.missing),
            "estimated": self.estimated,
        }


class EnergyMeter:
    """Measures from its creation to `stop`; neither waits for hardware. `Sampler.measure_energy` makes one.

    Args:
        history: gives the samples by device id, oldest first.
        now: the clock of the samples.
        reach_s: see `energy_between`; more where samples are further apart.
        estimate: integrate power samples where a device has no energy counter.
    """

    def __init__(
        self,
        history: Callable[[], Mapping[str, Sequence[DeviceSnapshot]]],
        now: Callable[[], float],
        reach_s: float,
        estimate: bool = False,
    ) -> None:
        self._history = history
        self._now = now
        self._reach_s = reach_s
        self._estimate = estimate
        # Two, so that there is a slope even when no sample follows; kept here, as the ring may forget them.
        self._before = {device: list(samples)[-2:] for device, samples in history().items()}
        self._start_s = now()

    def stop(self, num_tokens: int, start_s: float | None = None, end_s: float | None = None) -> EnergyUse:
        """Energy so far; may be called again later for a longer stretch.

        Args:
            num_tokens: tokens emitted in that time.
            start_s, end_s: count from then and until then only; within the time since the meter was made.
        """
        start_s = self._start_s if start_s is None else start_s
        end_s = self._now() if end_s is None else end_s
        devices = []
        for device, recent in self._history().items():
            before = self._before.get(device, [])
            newest_before = before[-1].time_s if before else float("-inf")
            samples = [*before, *(sample for sample in recent if sample.time_s > newest_before)]
            if samples:
                devices.append(self._device(samples, start_s, end_s))
        return EnergyUse(end_s - start_s, num_tokens, tuple(devices))

    def _device(self, samples: Sequence[DeviceSnapshot], start_s: float, end_s: float) -> DeviceEnergy:
        counted = [(sample.time_s, sample.energy) for sample in samples if sample.energy is not None]
        reach_s = self._reach_s
        if len(samples) > 1:  # the sampler may have had to stretch its interval
            reach_s = max(reach_s, 2 * (samples[-1].time_s - samples[-2].time_s))
        energy_j = energy_between(counted, start_s, end_s, reach_s)
        estimated = False
        if energy_j is None and self._estimate:
            powers = [(s.time_s, s.energy_estimate) for s in samples if s.energy_estimate is not None]
            energy_j = energy_between(powers, start_s, end_s, reach_s)
            estimated = energy_j is not None
        return DeviceEnergy(samples[-1].device, energy_j, estimated)
