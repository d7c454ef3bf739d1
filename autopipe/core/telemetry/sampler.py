"""Samples all sources in the background and keeps the recent past; asking it never waits for hardware."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from autopipe.core.affinity import usable_cores
from autopipe.core.errors import ConfigError
from autopipe.core.telemetry.energy import EnergyMeter, PowerIntegral
from autopipe.core.telemetry.snapshot import DeviceInfo, DeviceSnapshot, Snapshot
from autopipe.core.telemetry.source import TelemetrySource, TelemetryUnavailableError
from autopipe.core.telemetry.use import UseMeter

logger = logging.getLogger(__name__)

SHORTEST_INTERVAL_S = 0.1
_STOP_WAIT_S = 2.0
_BUDGET_PER_CORE = 0.001


def sampling_delay_s(interval_s: float, sweep_s: float, cpu_s: float, cpu_budget: float) -> float:
    """Seconds to sleep after a sweep that took `sweep_s`, of which `cpu_s` on the processor.

    The interval is stretched so that sweeping takes at most the share `cpu_budget` of one core, and keeps
    the driver busy at most half of the time.
    """
    return max(interval_s, cpu_s / cpu_budget, 2 * sweep_s) - sweep_s


class Sampler:
    """One daemon thread per source, so that a driver that hangs does not hide the other sources.

    A source that is not there costs one line in the log (and in `Snapshot.problems`); everything else goes
    on.

    Args:
        sources: what to sample; default: `default_sources()`. Opened in the threads, by `start`.
        interval_s: time between the beginnings of two sweeps, at least 0.1.
        history: snapshots kept per device.
        cpu_budget: most processor time a source may take, as a share of one core; if need be the interval
            grows. Default: 0.001 for each core this process may use.

    Raises:
        ConfigError: an argument out of range.
    """

    def __init__(
        self,
        sources: Sequence[TelemetrySource] | None = None,
        interval_s: float = 0.25,
        history: int = 2400,
        cpu_budget: float | None = None,
    ) -> None:
        if not SHORTEST_INTERVAL_S <= interval_s < float("inf"):
            raise ConfigError("telemetry.interval_s", interval_s, f"at least {SHORTEST_INTERVAL_S} seconds")
        if history < 2:
            raise ConfigError("telemetry.history", history, "at least 2 snapshots")
        if cpu_budget is None:
            cpu_budget = min(1.0, _BUDGET_PER_CORE * usable_cores())
        if not 0 < cpu_budget <= 1:
            raise ConfigError("telemetry.cpu_budget", cpu_budget, "above 0, at most 1")
        if sources is None:
            from autopipe.core.telemetry import default_sources

            sources = default_sources()
        self.interval_s = interval_s
        self._sources = tuple(sources)
        self._num_kept = history
        self._cpu_budget = cpu_budget
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._newest: dict[int, tuple[DeviceSnapshot, ...]] = {}
        self._num_sweeps = [0] * len(self._sources)
        self._problems: dict[int, str] = {}
        self._rings: dict[str, deque[DeviceSnapshot]] = {}
        self._integrals: dict[str, PowerIntegral] = {}
        self._stop = threading.Event()
        self._running = False
        self._threads: dict[int, threading.Thread] = {}

    def start(self) -> Sampler:
        """Begin to sample; returns at once. Does nothing when running."""
        if self._running:
            return self
        self._running = True
        self._stop = threading.Event()
        with self._lock:
            self._problems.clear()
            self._newest.clear()
            self._num_sweeps = [0] * len(self._sources)
        for index, source in enumerate(self._sources):
            if index in self._threads:  # left behind by `stop`, still in the driver: the source is not free
                self._fail(index, f"{source.name}: hangs in its driver")
                continue
            self._threads[index] = threading.Thread(
                target=self._run, args=(index, self._stop), name=f"telemetry-{source.name}", daemon=True
            )
            self._threads[index].start()
        return self

    def stop(self) -> None:
        """Stop and close the sources; the history stays. Waits two seconds at most for a hung driver."""
        self._running = False
        self._stop.set()
        deadline = time.monotonic() + _STOP_WAIT_S
        for index, thread in list(self._threads.items()):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("%s hangs in its driver; left behind", thread.name)
            else:
                del self._threads[index]

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self, timeout_s: float, sweeps: int = 1) -> bool:
        """Wait until every source was read `sweeps` times or has failed; False when time is up before."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ready(sweeps), timeout_s)

    def _ready(self, sweeps: int) -> bool:
        return all(count >= sweeps or index in self._problems for index, count in enumerate(self._num_sweeps))

    def snapshot(self) -> Snapshot:
        """The newest reading of every device; takes microseconds."""
        with self._lock:
            devices = tuple(device for index in sorted(self._newest) for device in self._newest[index])
            problems = tuple(self._problems[index] for index in sorted(self._problems))
        return Snapshot(time.monotonic(), devices, problems)

    def history(self, device: str) -> tuple[DeviceSnapshot, ...]:
        """The kept readings of a device, by id or label (`cuda:0`), oldest first; empty when not known."""
        with self._lock:
            for ring in self._rings.values():
                if device in (ring[-1].device.id, ring[-1].device.label):
                    return tuple(ring)
        return ()

    def readings_since(self, time_s: float) -> list[tuple[DeviceInfo, tuple[DeviceSnapshot, ...]]]:
        """Of each device the kept readings since then, oldest first; the newest one where there is none."""
        with self._lock:
            devices = [device for index in sorted(self._newest) for device in self._newest[index]]
            rings = [(reading.device, self._rings.get(reading.device.id), reading) for reading in devices]
            return [
                (info, tuple(reading for reading in ring or () if reading.time_s >= time_s) or (newest,))
                for info, ring, newest in rings
            ]

    def measure_use(self) -> UseMeter:
        """Begin to measure energy and devices; `.stop(num_tokens)` on the result gives the `TelemetryUse`."""
        return UseMeter(self)

    def measure_energy(self, estimate: bool = False) -> EnergyMeter:
        """Begin to measure energy; `.stop(num_tokens)` on the result gives the `EnergyUse`.

        Args:
            estimate: integrate power samples where a device has no energy counter, and flag the figure.
        """
        return EnergyMeter(self._all_history, time.monotonic, max(1.0, 4 * self.interval_s), estimate)

    def _all_history(self) -> dict[str, tuple[DeviceSnapshot, ...]]:
        with self._lock:
            return {device: tuple(ring) for device, ring in self._rings.items()}

    def _run(self, index: int, stop: threading.Event) -> None:
        source = self._sources[index]
        try:
            source.open()
        except TelemetryUnavailableError as error:
            logger.log(logging.INFO if error.expected else logging.WARNING, "%s", error)
            self._fail(index, str(error))
            return
        except Exception as error:  # a third party's source must not take anything down
            logger.exception("telemetry source %s does not open", source.name)
            self._fail(index, f"{source.name}: {error!r}")
            return
        try:
            self._sweep_until(index, source, stop)
        finally:
            source.close()

    def _sweep_until(self, index: int, source: TelemetrySource, stop: threading.Event) -> None:
        warned = False
        while not stop.is_set():
            begin_s, cpu_begin_s = time.monotonic(), time.thread_time()
            try:
                self._store(index, source.read())
            except Exception as error:  # likewise
                if not warned:
                    logger.exception("telemetry source %s cannot be read; trying on", source.name)
                    warned = True
                self._fail(index, f"{source.name}: {error!r}")
            sweep_s, cpu_s = time.monotonic() - begin_s, time.thread_time() - cpu_begin_s
            stop.wait(sampling_delay_s(self.interval_s, sweep_s, cpu_s, self._cpu_budget))

    def _store(self, index: int, readings: Sequence[DeviceSnapshot]) -> None:
        with self._changed:
            complete = tuple(self._with_estimate(reading) for reading in readings)
            ids = {reading.device.id for reading in complete}
            for gone in {reading.device.id for reading in self._newest.get(index, ())} - ids:
                self._rings.pop(gone, None)  # a GPU that was lost from the start now says its UUID
            for reading in complete:
                self._rings.setdefault(reading.device.id, deque(maxlen=self._num_kept)).append(reading)
            self._newest[index] = complete
            self._problems.pop(index, None)
            self._num_sweeps[index] += 1
            self._changed.notify_all()

    def _with_estimate(self, reading: DeviceSnapshot) -> DeviceSnapshot:
        """Add the integral of power, where there is no energy counter."""
        if reading.energy is not None or (reading.power_w is None and reading.device.id not in self._integrals):
            return reading
        integral = self._integrals.setdefault(reading.device.id, PowerIntegral())
        return replace(reading, energy_estimate=integral.update(reading.time_s, reading.power_w))

    def _fail(self, index: int, problem: str) -> None:
        with self._changed:
            self._problems[index] = problem
            self._changed.notify_all()
