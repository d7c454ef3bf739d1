"""The contract of `TelemetrySource` as tests. Subclass the suite in a test module and let pytest collect it:

    class TestMySource(TelemetrySourceSuite):
        def make_source(self):
            return MySource()

A source that cannot be opened on the machine skips nothing: make one that can (a fake driver, a recorded
device).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import FrozenInstanceError

from autopipe.core.telemetry.snapshot import DeviceSnapshot
from autopipe.core.telemetry.source import TelemetrySource, TelemetryUnavailableError

_SHARES = (
    "utilisation",
    "memory_utilisation",
    "sm_utilisation",
    "sm_occupancy",
    "dram_bandwidth_utilisation",
)
_NOT_NEGATIVE = (
    "memory_used_bytes",
    "memory_total_bytes",
    "power_w",
    "power_limit_w",
    "clock_mhz",
    "memory_clock_mhz",
    "nvlink_tx_bytes_per_s",
    "nvlink_rx_bytes_per_s",
    "pcie_tx_bytes_per_s",
    "pcie_rx_bytes_per_s",
)
_DIFFERENCED = ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")
_FIGURES = (*_SHARES, *_NOT_NEGATIVE, "energy", "temperature_c", "throttle_reasons", "cores")


class ConformanceError(AssertionError):
    """A source breaks the contract; the message says where."""


class TelemetrySourceSuite:
    """Tests every source must pass.

    Attributes:
        pause_s: between two readings; longer where a source's counters move slowly.
    """

    pause_s = 0.12

    def make_source(self) -> TelemetrySource:
        """A new source that can be opened, with at least one device."""
        raise NotImplementedError

    def test_name_is_one_short_word(self) -> None:
        name = self.make_source().name
        _require(0 < len(name) <= 40 and " " not in name, f"name {name!r} is not one short word")

    def test_reads_at_least_one_device(self) -> None:
        with _opened(self.make_source()) as source:
            _require(len(source.read()) > 0, "no device was read")

    def test_snapshots_are_typed_and_frozen(self) -> None:
        for snapshot in self._readings(1)[0]:
            _require(isinstance(snapshot, DeviceSnapshot), f"{type(snapshot).__name__} is no DeviceSnapshot")
            try:
                snapshot.time_s = 0.0  # type: ignore[misc]  # frozen: it must fail
            except FrozenInstanceError:
                continue
            raise ConformanceError("a snapshot can be changed")

    def test_device_ids_are_unique(self) -> None:
        ids = [snapshot.device.id for snapshot in self._readings(1)[0]]
        _require(len(set(ids)) == len(ids), f"two devices share an id: {ids}")

    def test_devices_and_their_order_stay(self) -> None:
        first, second, third = self._readings(3)
        devices = [[snapshot.device for snapshot in reading] for reading in (first, second, third)]
        _require(devices[0] == devices[1] == devices[2], f"the devices changed: {devices}")

    def test_time_stamps_are_monotonic_seconds(self) -> None:
        before = time.monotonic()
        readings = self._readings(2)
        after = time.monotonic()
        for old, new in zip(*readings, strict=True):
            _require(before <= old.time_s <= new.time_s <= after, f"{new.device.id}: not time.monotonic()")

    def test_shares_lie_between_0_and_1(self) -> None:
        for snapshot in self._readings(2)[1]:
            for figure in _SHARES:
                value = getattr(snapshot, figure)
                _require(value is None or 0 <= value <= 1, f"{snapshot.device.id}: {figure} is {value}")

    def test_figures_are_not_negative(self) -> None:
        for snapshot in self._readings(2)[1]:
            for figure in _NOT_NEGATIVE:
                value = getattr(snapshot, figure)
                _require(value is None or value >= 0, f"{snapshot.device.id}: {figure} is {value}")

    def test_used_memory_is_within_total_memory(self) -> None:
        for snapshot in self._readings(1)[0]:
            used, total = snapshot.memory_used_bytes, snapshot.memory_total_bytes
            _require((used is None) == (total is None), f"{snapshot.device.id}: used {used}, total {total}")
            _require(used is None or total is None or used <= total, f"{snapshot.device.id}: {used} > {total}")
            _require(total != 0, f"{snapshot.device.id}: total memory 0 should be None")

    def test_first_reading_has_no_differenced_figures(self) -> None:
        for snapshot in self._readings(1)[0]:
            for figure in _DIFFERENCED:
                value = getattr(snapshot, figure)
                _require(value is None, f"{snapshot.device.id}: {figure} is {value} in the first reading")
            if snapshot.cores is not None:
                loads = [core.utilisation for core in snapshot.cores]
                _require(not any(loads) and 0.0 not in loads, f"loads in the first reading: {loads}")

    def test_energy_never_falls_within_an_epoch(self) -> None:
        first, second = self._readings(2)
        for old, new in zip(first, second, strict=True):
            if old.energy and new.energy and old.energy.epoch == new.energy.epoch:
                _require(new.energy.total_j >= old.energy.total_j, f"{new.device.id}: the energy total fell")

    def test_a_failed_device_has_no_figures(self) -> None:
        for snapshot in self._readings(2)[1]:
            if snapshot.error is not None:
                known = [figure for figure in _FIGURES if getattr(snapshot, figure) is not None]
                _require(not known, f"{snapshot.device.id} failed ({snapshot.error}), but has {known}")

    def test_snapshots_go_into_json(self) -> None:
        for snapshot in self._readings(2)[1]:
            json.dumps(snapshot.to_dict(), allow_nan=False)

    def test_close_may_be_called_at_any_time(self) -> None:
        source = self.make_source()
        source.close()
        source.open()
        source.close()
        source.close()

    def test_reading_a_closed_source_says_so(self) -> None:
        source = self.make_source()
        try:
            source.read()
        except TelemetryUnavailableError:
            return
        raise ConformanceError("read() of a source that is not open must raise TelemetryUnavailableError")

    def test_may_be_opened_again(self) -> None:
        source = self.make_source()
        with _opened(source):
            devices = [snapshot.device for snapshot in source.read()]
        with _opened(source):
            again = [snapshot.device for snapshot in source.read()]
        _require(devices == again, f"other devices after reopening: {devices} and {again}")

    def _readings(self, count: int) -> list[tuple[DeviceSnapshot, ...]]:
        readings = []
        with _opened(self.make_source()) as source:
            for index in range(count):
                if index:
                    time.sleep(self.pause_s)
                readings.append(source.read())
        return readings


@contextlib.contextmanager
def _opened(source: TelemetrySource) -> Iterator[TelemetrySource]:
    source.open()
    try:
        yield source
    finally:
        source.close()


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConformanceError(message)
