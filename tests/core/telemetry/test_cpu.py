import time
from collections import namedtuple

import psutil
import pytest

from autopipe.core.telemetry import CpuSource
from tests.core.telemetry.test_rapl import zone

Times = namedtuple("Times", "user nice system idle iowait guest")
Frequency = namedtuple("Frequency", "current min max")
Sensor = namedtuple("Sensor", "label current")


@pytest.fixture
def machine(monkeypatch):
    """Two cores whose figures a test may set."""
    figures = {
        "times": [Times(1, 0, 1, 8, 0, 0), Times(1, 0, 1, 8, 0, 0)],
        "clocks": [Frequency(2000.0, 0, 0), Frequency(3000.0, 0, 0)],
        "sensors": {"coretemp": [Sensor("Package id 0", 61.0), Sensor("Core 0", 58.0)]},
    }
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: figures["times"])
    monkeypatch.setattr(psutil, "cpu_freq", lambda percpu: figures["clocks"])
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: figures["sensors"], raising=False)
    return figures


@pytest.fixture
def source(tmp_path):
    source = CpuSource(powercap=tmp_path)
    source.open()
    return source


def read(source):
    (snapshot,) = source.read()
    return snapshot


def test_load_is_none_at_first_and_then_the_share_of_time_busy(machine, source):
    assert [core.utilisation for core in read(source).cores] == [None, None]
    machine["times"] = [Times(2, 0, 1, 11, 0, 0), Times(3, 0, 3, 8, 0, 0)]
    snapshot = read(source)
    assert [core.utilisation for core in snapshot.cores] == [0.25, 1.0]
    assert snapshot.utilisation == 0.625


def test_time_of_guests_is_not_counted_twice_and_waiting_is_idling(machine, source):
    read(source)
    machine["times"] = [Times(3, 0, 1, 9, 1, 2), Times(1, 0, 1, 8, 0, 0)]
    assert read(source).cores[0].utilisation == 0.5


def test_core_that_was_switched_off_makes_loads_unknown_once(machine, source):
    read(source)
    machine["times"] = machine["times"][:1]
    assert [core.utilisation for core in read(source).cores] == [None]


def test_clock_is_by_core_and_in_the_mean(machine, source):
    snapshot = read(source)
    assert [core.clock_mhz for core in snapshot.cores] == [2000.0, 3000.0]
    assert snapshot.clock_mhz == 2500.0


def test_clock_of_zero_is_unknown(machine, source):
    machine["clocks"] = [Frequency(0.0, 0, 0)] * 2
    snapshot = read(source)
    assert [core.clock_mhz for core in snapshot.cores] == [None, None]
    assert snapshot.clock_mhz is None


def test_temperature_is_that_of_the_hottest_cpu_sensor(machine, source):
    machine["sensors"]["nvme"] = [Sensor("Composite", 90.0)]
    assert read(source).temperature_c == 61.0


def test_machine_without_sensors_is_asked_once(machine, source, monkeypatch):
    calls = []
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: calls.append(1) or {})
    monkeypatch.setattr("autopipe.core.telemetry.cpu._SLOW_FIGURES_EVERY_S", 0.0)
    assert [read(source).temperature_c for _ in range(3)] == [None] * 3
    assert len(calls) == 1


def test_memory_used_is_what_is_not_available(machine, source, monkeypatch):
    memory = namedtuple("Memory", "total available")(1000, 400)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    snapshot = read(source)
    assert (snapshot.memory_used_bytes, snapshot.memory_total_bytes) == (600, 1000)


def test_energy_and_power_are_none_without_rapl(machine, source):
    read(source)
    snapshot = read(source)
    assert (snapshot.energy, snapshot.power_w) == (None, None)


def test_power_is_the_energy_since_the_last_reading(machine, tmp_path):
    counter = zone(tmp_path, "0", "package-0", 100_000, most_uj=100_000_000)
    source = CpuSource(powercap=tmp_path)
    source.open()
    first = read(source)
    counter.write_text("1100000\n")
    time.sleep(0.01)
    second = read(source)
    assert first.power_w is None
    assert second.energy.total_j - first.energy.total_j == pytest.approx(1.0)
    assert second.power_w == pytest.approx(1.0 / (second.time_s - first.time_s))
