"""The machine's CPU and main memory, through psutil and RAPL."""

from __future__ import annotations

import logging
import platform
import time
from pathlib import Path
from typing import Any

import psutil

from autopipe.core.telemetry.counters import AskOnce, Unsupported
from autopipe.core.telemetry.rapl import POWERCAP, Rapl
from autopipe.core.telemetry.snapshot import (
    CoreSnapshot,
    DeviceInfo,
    DeviceKind,
    DeviceSnapshot,
    EnergyCounter,
)
from autopipe.core.telemetry.source import TelemetrySource, TelemetryUnavailableError

logger = logging.getLogger(__name__)

_SLOW_FIGURES_EVERY_S = 1.0  # a file per core or sensor, some of which take milliseconds
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "acpitz")


class CpuSource(TelemetrySource):
    """One device, `cpu`: all cores and the main memory.

    Power is the mean since the last reading, from the energy counter.

    Args:
        powercap: folder of RAPL's files.
    """

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._rapl = Rapl(powercap)
        self._ask = AskOnce("cpu")
        self._info = DeviceInfo("cpu", DeviceKind.CPU, _model_name())
        self._times: list[tuple[float, float]] = []
        self._last_energy: tuple[float, EnergyCounter] | None = None
        self._slow: tuple[float, list[float | None], float | None] | None = None
        self._open = False

    @property
    def name(self) -> str:
        return "cpu"

    def open(self) -> None:
        self._open = True
        self._times = []
        self._last_energy = self._slow = None

    def close(self) -> None:
        self._open = False

    def read(self) -> tuple[DeviceSnapshot, ...]:
        if not self._open:
            raise TelemetryUnavailableError("cpu: the source is not open")
        time_s = time.monotonic()
        energy = self._ask("energy", self._energy)
        loads = self._loads()
        clocks, temperature = self._slow_figures(time_s)
        memory = self._ask("memory", psutil.virtual_memory)
        cores = _cores(loads, clocks)
        return (
            DeviceSnapshot(
                self._info,
                time_s,
                utilisation=_mean([core.utilisation for core in cores]),
                memory_used_bytes=None if memory is None else int(memory.total - memory.available),
                memory_total_bytes=None if memory is None else int(memory.total),
                power_w=self._power(time_s, energy),
                energy=energy,
                temperature_c=temperature,
                clock_mhz=_mean([core.clock_mhz for core in cores]),
                cores=cores or None,
            ),
        )

    def _energy(self) -> EnergyCounter:
        try:
            return self._rapl.read()
        except Unsupported as error:
            logger.info("%s", error)
            raise

    def _power(self, time_s: float, energy: EnergyCounter | None) -> float | None:
        last, self._last_energy = self._last_energy, None if energy is None else (time_s, energy)
        if last is None or energy is None or energy.epoch != last[1].epoch or time_s <= last[0]:
            return None
        return (energy.total_j - last[1].total_j) / (time_s - last[0])

    def _loads(self) -> list[float | None]:
        """Share of time each core was busy since the last reading."""
        now = [_busy_and_total(times) for times in self._ask("times", _core_times) or []]
        before, self._times = self._times, now
        if len(before) != len(now):  # the first reading, or a core was switched on or off
            return [None] * len(now)
        loads: list[float | None] = []
        for (busy, total), (busy_before, total_before) in zip(now, before, strict=True):
            passed = total - total_before
            loads.append(min(1.0, max(0.0, (busy - busy_before) / passed)) if passed > 0 else None)
        return loads

    def _slow_figures(self, time_s: float) -> tuple[list[float | None], float | None]:
        """Clock of each core and temperature, renewed once a second."""
        if self._slow is None or time_s - self._slow[0] >= _SLOW_FIGURES_EVERY_S:
            self._slow = (time_s, self._ask("clock", _clocks) or [], self._ask("temperature", _temperature))
        return self._slow[1:]


def _core_times() -> list[Any]:
    return list(psutil.cpu_times(percpu=True))


def _busy_and_total(times: Any) -> tuple[float, float]:
    """Seconds busy and in all. Guests' time is in `user` and `nice` already; waiting for input is idling."""
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total


def _clocks() -> list[float | None]:
    """MHz of each core, or one figure for all."""
    try:
        found = psutil.cpu_freq(percpu=True)
    except (AttributeError, NotImplementedError, OSError, RuntimeError) as error:
        raise Unsupported(f"clock: {error}") from None
    clocks = [float(entry.current) if entry.current else None for entry in found or []]
    if not any(clocks):
        raise Unsupported("no clock figures")
    return clocks


def _temperature() -> float:
    """Of the hottest sensor of the best known kind."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, NotImplementedError, OSError, RuntimeError) as error:
        raise Unsupported(f"temperature: {error}") from None
    for kind in _SENSORS:
        found = [float(entry.current) for entry in sensors.get(kind, []) if entry.current]
        if found:
            return max(found)
    raise Unsupported("no CPU temperature sensor")


def _cores(loads: list[float | None], clocks: list[float | None]) -> tuple[CoreSnapshot, ...]:
    if len(clocks) == 1:
        clocks = clocks * len(loads)
    if len(clocks) != len(loads):
        clocks = [None] * len(loads)
    return tuple(CoreSnapshot(load, clock) for load, clock in zip(loads, clocks, strict=True))


def _mean(figures: list[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) / len(known) if known else None


def _model_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or "CPU"
