import logging
import threading
import time

import pytest

from autopipe.core.errors import ConfigError
from autopipe.core.telemetry import (
    DeviceInfo,
    DeviceKind,
    DeviceSnapshot,
    EnergyCounter,
    NvmlSource,
    Sampler,
    TelemetrySource,
    TelemetryUnavailableError,
)
from autopipe.core.telemetry.sampler import sampling_delay_s

WAIT_S = 20.0


class ScriptedSource(TelemetrySource):
    """One device whose `read` a test may replace; counts what is done to it."""

    def __init__(self, name="scripted", figures=None):
        self._name = name
        self.device = DeviceInfo(name, DeviceKind.OTHER, name)
        self.figures = figures or (lambda count: {"utilisation": 0.5})
        self.num_reads = self.num_opens = self.num_closes = 0

    @property
    def name(self):
        return self._name

    def open(self):
        self.num_opens += 1

    def read(self):
        self.num_reads += 1
        return (DeviceSnapshot(self.device, time.monotonic(), **self.figures(self.num_reads)),)

    def close(self):
        self.num_closes += 1


class MissingSource(ScriptedSource):
    def __init__(self, expected=False):
        super().__init__("missing")
        self.expected = expected

    def open(self):
        raise TelemetryUnavailableError("it is not there", expected=self.expected)


def sampling(*sources, **options):
    return Sampler(sources, interval_s=0.1, **options)


def test_snapshot_holds_the_newest_reading_of_every_source():
    with sampling(ScriptedSource("a"), ScriptedSource("b", lambda count: {"power_w": 1.0 * count})) as sampler:
        assert sampler.wait(WAIT_S, sweeps=2)
        snapshot = sampler.snapshot()
    assert [device.device.id for device in snapshot] == ["a", "b"]
    assert snapshot.get("b").power_w >= 2.0
    assert snapshot.get("c") is None


def test_snapshot_before_the_first_reading_is_empty():
    sampler = sampling(ScriptedSource())
    assert sampler.snapshot().devices == ()
    assert sampler.history("scripted") == ()


def test_history_is_a_ring():
    with sampling(ScriptedSource(figures=lambda count: {"power_w": float(count)}), history=2) as sampler:
        assert sampler.wait(WAIT_S, sweeps=3)
        powers = [reading.power_w for reading in sampler.history("scripted")]
    assert len(powers) == 2
    assert powers[1] == powers[0] + 1


def test_sources_are_closed_at_the_end():
    source = ScriptedSource()
    with sampling(source) as sampler:
        assert sampler.wait(WAIT_S)
    assert (source.num_opens, source.num_closes) == (1, 1)


def test_sampling_ends_with_stop():
    source = ScriptedSource()
    with sampling(source) as sampler:
        assert sampler.wait(WAIT_S)
    num_reads = source.num_reads
    time.sleep(0.25)
    assert source.num_reads == num_reads


def test_may_be_started_again():
    source = ScriptedSource()
    sampler = sampling(source)
    for _ in range(2):
        with sampler:
            assert sampler.wait(WAIT_S)
    assert (source.num_opens, source.num_closes) == (2, 2)


def test_starting_twice_samples_once():
    source = ScriptedSource()
    with sampling(source) as sampler:
        sampler.start()
        assert sampler.wait(WAIT_S)
    assert source.num_opens == 1


def test_missing_source_is_one_line_and_the_others_go_on(caplog):
    with sampling(MissingSource(), ScriptedSource()) as sampler:
        assert sampler.wait(WAIT_S, sweeps=2)
        snapshot = sampler.snapshot()
    assert snapshot.problems == ("it is not there",)
    assert [record.getMessage() for record in caplog.records] == ["it is not there"]
    assert snapshot.get("scripted").utilisation == 0.5


def test_source_a_machine_need_not_have_is_no_warning(caplog):
    caplog.set_level(logging.WARNING)
    with sampling(MissingSource(expected=True)) as sampler:
        assert sampler.wait(WAIT_S)
    assert caplog.records == []


def test_source_that_raises_is_logged_once_and_read_again(caplog):
    def figures(count):
        if count < 3:
            raise ValueError("a bug")
        return {"utilisation": 0.1}

    with sampling(ScriptedSource(figures=figures)) as sampler:
        assert sampler.wait(WAIT_S)
        assert "a bug" in sampler.snapshot().problems[0]
        deadline = time.monotonic() + WAIT_S
        while sampler.snapshot().get("scripted") is None and time.monotonic() < deadline:
            time.sleep(0.02)
        snapshot = sampler.snapshot()
    assert snapshot.get("scripted").utilisation == 0.1
    assert snapshot.problems == ()
    assert caplog.text.count("cannot be read") == 1


def test_source_that_hangs_hides_no_other(caplog, monkeypatch):
    monkeypatch.setattr("autopipe.core.telemetry.sampler._STOP_WAIT_S", 0.1)
    release = threading.Event()
    hanging = ScriptedSource("hanging", lambda count: release.wait(WAIT_S) and {})
    try:
        with sampling(hanging, ScriptedSource("b")) as sampler:
            deadline = time.monotonic() + WAIT_S
            while sampler.snapshot().get("b") is None and time.monotonic() < deadline:
                time.sleep(0.02)
            assert sampler.snapshot().get("b") is not None
            assert sampler.snapshot().get("hanging") is None
        assert "hangs in its driver" in caplog.text
        with sampler:
            assert sampler.wait(WAIT_S)
            assert sampler.snapshot().problems == ("hanging: hangs in its driver",)
        assert hanging.num_opens == 1
    finally:
        release.set()


def test_energy_is_measured_over_a_stretch():
    source = ScriptedSource(figures=lambda count: {"energy": EnergyCounter(100.0 * time.monotonic())})
    with sampling(source) as sampler:
        assert sampler.wait(WAIT_S, sweeps=2)
        meter = sampler.measure_energy()
        time.sleep(0.3)
        use = meter.stop(num_tokens=10)
    assert use.total_j == pytest.approx(100.0 * use.duration_s, rel=0.05)
    assert use.j_per_token == {"scripted": pytest.approx(10.0 * use.duration_s, rel=0.05)}


def test_power_is_integrated_where_there_is_no_counter():
    with sampling(ScriptedSource(figures=lambda count: {"power_w": 50.0})) as sampler:
        assert sampler.wait(WAIT_S, sweeps=2)
        meter = sampler.measure_energy(estimate=True)
        time.sleep(0.3)
        use = meter.stop(num_tokens=10)
    assert use.estimated
    assert use.total_j == pytest.approx(50.0 * use.duration_s, rel=0.05)


def test_gpu_energy_per_token_comes_from_its_counter_and_is_none_for_one_without(nvml):
    nvml.add_gpu("GPU-a", energy=1_000)
    nvml.add_gpu("GPU-b", energy=None)
    with sampling(NvmlSource()) as sampler:
        assert sampler.wait(WAIT_S, sweeps=2)
        meter = sampler.measure_energy()
        num_before = len(sampler.history("cuda:0"))
        assert sampler.wait(WAIT_S, sweeps=num_before + 1)
        nvml.set({"0.energy": 31_000})
        assert sampler.wait(WAIT_S, sweeps=num_before + 4)
        use = meter.stop(num_tokens=10)
    assert use.j_per_token == {"cuda:0": pytest.approx(3.0), "cuda:1": None}
    assert use.total_j_per_token == pytest.approx(3.0)
    assert use.missing == ("cuda:1",)


def test_gpu_that_at_last_says_its_uuid_leaves_no_second_device_behind(nvml):
    nvml.add_gpu("GPU-a", state=15)
    with sampling(NvmlSource(retry_s=(0.0, 0.0))) as sampler:
        assert sampler.wait(WAIT_S)
        assert sampler.snapshot().get("cuda:0").device.id == "gpu-0"
        nvml.set({"0.state": None})
        deadline = time.monotonic() + WAIT_S
        while sampler.snapshot().get("GPU-a") is None and time.monotonic() < deadline:
            time.sleep(0.02)
        use = sampler.measure_energy().stop(num_tokens=1)
    assert [device.device.id for device in use.devices] == ["GPU-a"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"interval_s": 0.05}, "telemetry.interval_s"),
        ({"interval_s": float("nan")}, "telemetry.interval_s"),
        ({"history": 1}, "telemetry.history"),
        ({"cpu_budget": 0.0}, "telemetry.cpu_budget"),
    ],
)
def test_option_out_of_range_is_a_config_error(options, key):
    with pytest.raises(ConfigError) as caught:
        Sampler([], **options)
    assert caught.value.key == key


def test_cheap_sweeps_keep_the_interval():
    assert sampling_delay_s(0.25, sweep_s=0.01, cpu_s=0.0001, cpu_budget=0.002) == pytest.approx(0.24)


def test_sweeps_that_cost_processor_time_stretch_the_interval_to_the_budget():
    assert sampling_delay_s(0.25, sweep_s=0.01, cpu_s=0.01, cpu_budget=0.002) == pytest.approx(4.99)


def test_slow_sweeps_leave_the_driver_free_half_of_the_time():
    assert sampling_delay_s(0.1, sweep_s=0.42, cpu_s=0.0, cpu_budget=0.002) == pytest.approx(0.42)
