"""Our own sources pass the public suite, and the suite catches sources that break the contract."""

import time

import pytest

from autopipe.core.telemetry import (
    ConformanceError,
    CpuSource,
    DeviceInfo,
    DeviceKind,
    DeviceSnapshot,
    EnergyCounter,
    NvmlSource,
    TelemetrySource,
    TelemetrySourceSuite,
    TelemetryUnavailableError,
)

PAUSE_S = 0.02
DEVICE = DeviceInfo("x", DeviceKind.OTHER, "x")


class TestCpuSource(TelemetrySourceSuite):
    pause_s = PAUSE_S

    def make_source(self):
        return CpuSource()


class TestNvmlSource(TelemetrySourceSuite):
    pause_s = PAUSE_S

    @pytest.fixture(autouse=True)
    def _driver(self, nvml):
        nvml.add_gpu("GPU-a")
        nvml.add_gpu("GPU-b", power=None, energy=None, gpm=None, memory_total=None)

    def make_source(self):
        return NvmlSource()


class TestNvmlSourceWithALostGpu(TestNvmlSource):
    @pytest.fixture(autouse=True)
    def _lost(self, nvml, _driver):
        nvml.set({"0.state": 15})


class Broken(TelemetrySource):
    """Follows the contract but for what a test makes it do."""

    name = "broken"

    def __init__(self, read):
        self._read = read
        self._open = False
        self._num_reads = 0

    def open(self):
        self._open = True

    def close(self):
        self._open = False

    def read(self):
        if not self._open:
            raise TelemetryUnavailableError("closed")
        self._num_reads += 1
        return self._read(self._num_reads)


def one(count, **figures):
    return (DeviceSnapshot(DEVICE, time.monotonic(), **figures),)


@pytest.mark.parametrize(
    ("test", "read"),
    [
        ("test_reads_at_least_one_device", lambda count: ()),
        ("test_device_ids_are_unique", lambda count: one(count) * 2),
        (
            "test_devices_and_their_order_stay",
            lambda count: (DeviceSnapshot(DeviceInfo(str(count), DeviceKind.OTHER, "x"), time.monotonic()),),
        ),
        ("test_time_stamps_are_monotonic_seconds", lambda count: (DeviceSnapshot(DEVICE, time.time()),)),
        ("test_shares_lie_between_0_and_1", lambda count: one(count, utilisation=40.0)),
        ("test_figures_are_not_negative", lambda count: one(count, power_w=-1.0)),
        (
            "test_used_memory_is_within_total_memory",
            lambda count: one(count, memory_used_bytes=2, memory_total_bytes=1),
        ),
        (
            "test_first_reading_has_no_differenced_figures",
            lambda count: one(count, nvlink_tx_bytes_per_s=0.0),
        ),
        (
            "test_energy_never_falls_within_an_epoch",
            lambda count: one(count, energy=EnergyCounter(10.0 / count)),
        ),
        ("test_a_failed_device_has_no_figures", lambda count: one(count, error="lost", power_w=0.0)),
        ("test_snapshots_go_into_json", lambda count: one(count, power_w=float("nan"))),
    ],
)
def test_suite_catches_a_source_that_breaks_the_contract(test, read):
    class Suite(TelemetrySourceSuite):
        pause_s = 0.0

        def make_source(self):
            return Broken(read)

    with pytest.raises((ConformanceError, ValueError)):
        getattr(Suite(), test)()


def test_suite_passes_a_source_that_keeps_the_contract():
    class Suite(TelemetrySourceSuite):
        pause_s = 0.0

        def make_source(self):
            return Broken(one)

    for name in dir(Suite):
        if name.startswith("test_"):
            getattr(Suite(), name)()
