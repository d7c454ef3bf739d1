import pytest

from autopipe.core.telemetry import DeviceInfo, DeviceKind, DeviceSnapshot, EnergyCounter, EnergyMeter
from autopipe.core.telemetry.energy import PowerIntegral, energy_between

GPU = DeviceInfo("GPU-a", DeviceKind.GPU, "Pretend GPU", ordinal=0)
CPU = DeviceInfo("cpu", DeviceKind.CPU, "Pretend CPU")


def totals(*pairs, epoch=0):
    return [(time_s, EnergyCounter(total_j, epoch)) for time_s, total_j in pairs]


def test_energy_is_interpolated_between_samples():
    samples = totals((0.0, 100.0), (1.0, 110.0), (2.0, 130.0))
    assert energy_between(samples, 0.5, 1.5, reach_s=1.0) == pytest.approx(15.0)


def test_energy_of_a_stretch_shorter_than_the_interval_is_its_share():
    assert energy_between(totals((0.0, 0.0), (1.0, 10.0)), 0.2, 0.3, reach_s=1.0) == pytest.approx(1.0)


def test_energy_follows_the_last_slope_a_little_beyond_the_samples():
    samples = totals((0.0, 0.0), (1.0, 10.0))
    assert energy_between(samples, 0.0, 1.5, reach_s=0.5) == pytest.approx(15.0)
    assert energy_between(samples, 0.0, 1.6, reach_s=0.5) is None


@pytest.mark.parametrize("samples", [[], totals((0.0, 5.0))])
def test_energy_of_fewer_than_two_samples_is_unknown(samples):
    assert energy_between(samples, 0.0, 1.0, reach_s=9.0) is None


def test_energy_across_a_counter_reset_is_unknown():
    samples = totals((0.0, 5.0)) + totals((1.0, 5.0), epoch=1)
    assert energy_between(samples, 0.0, 1.0, reach_s=1.0) is None


def test_power_is_integrated_by_trapezoids():
    integral = PowerIntegral()
    assert integral.update(0.0, 100.0) == EnergyCounter(0.0, 0)
    assert integral.update(2.0, 200.0) == EnergyCounter(300.0, 0)


def test_missing_power_begins_a_new_epoch_of_the_integral():
    integral = PowerIntegral()
    integral.update(0.0, 100.0)
    assert integral.update(1.0, None) is None
    assert integral.update(2.0, 100.0) == EnergyCounter(0.0, 1)


def test_long_gap_begins_a_new_epoch_of_the_integral():
    integral = PowerIntegral()
    integral.update(0.0, 100.0)
    assert integral.update(100.0, 100.0) == EnergyCounter(0.0, 1)


class Recorder:
    """A clock and a history that a test moves on by hand."""

    def __init__(self):
        self.time_s = 0.0
        self.rings = {}

    def add(self, device, **figures):
        self.rings.setdefault(device.id, []).append(DeviceSnapshot(device, self.time_s, **figures))

    def meter(self, estimate=False):
        return EnergyMeter(lambda: self.rings, lambda: self.time_s, reach_s=1.0, estimate=estimate)


@pytest.fixture
def recorder():
    return Recorder()


def test_energy_per_token_where_a_counter_exists_and_none_elsewhere(recorder):
    for energy_j in (50.0, 60.0):
        recorder.add(GPU, energy=EnergyCounter(energy_j))
        recorder.add(CPU)
        recorder.time_s += 1.0
    recorder.time_s = 1.0
    meter = recorder.meter()
    recorder.time_s = 3.0
    recorder.add(GPU, energy=EnergyCounter(80.0))
    recorder.add(CPU)
    use = meter.stop(num_tokens=10)
    assert use.j_per_token == {"cuda:0": pytest.approx(2.0), "cpu": None}
    assert use.total_j_per_token == pytest.approx(2.0)
    assert use.missing == ("cpu",)
    assert not use.estimated


def test_total_is_none_without_any_counter(recorder):
    recorder.add(CPU)
    use = recorder.meter().stop(num_tokens=10)
    assert (use.total_j, use.total_j_per_token, use.j_per_token) == (None, None, {"cpu": None})


def test_total_adds_the_devices(recorder):
    for step in range(3):
        recorder.time_s = float(step)
        recorder.add(GPU, energy=EnergyCounter(10.0 * step))
        recorder.add(CPU, energy=EnergyCounter(4.0 * step))
        if step == 0:
            meter = recorder.meter()
    assert meter.stop(num_tokens=7).total_j_per_token == pytest.approx(4.0)


def test_no_token_has_no_energy_per_token(recorder):
    for step in range(2):
        recorder.time_s = float(step)
        recorder.add(GPU, energy=EnergyCounter(10.0 * step))
    use = recorder.meter().stop(num_tokens=0)
    assert use.total_j == 0.0
    assert use.j_per_token == {"cuda:0": None}


def test_long_request_is_measured_though_the_ring_forgot_its_beginning(recorder):
    for step in range(2):
        recorder.time_s = float(step)
        recorder.add(GPU, energy=EnergyCounter(10.0 * step))
    meter = recorder.meter()
    recorder.rings.clear()
    for step in (1000, 1001):
        recorder.time_s = float(step)
        recorder.add(GPU, energy=EnergyCounter(10.0 * step))
    assert meter.stop(num_tokens=1).total_j == pytest.approx(10_000.0)


def test_samples_far_apart_still_measure_what_follows_them(recorder):
    for step in (0, 5):
        recorder.time_s = float(step)
        recorder.add(GPU, energy=EnergyCounter(10.0 * step))
    meter = recorder.meter()
    recorder.time_s = 9.0
    assert meter.stop(num_tokens=1).total_j == pytest.approx(40.0)


def test_power_samples_serve_only_when_asked_for_and_are_flagged(recorder):
    for step in range(3):
        recorder.time_s = float(step)
        recorder.add(GPU, energy_estimate=EnergyCounter(5.0 * step))
        if step == 0:
            exact, estimating = recorder.meter(), recorder.meter(estimate=True)
    assert exact.stop(num_tokens=1).total_j is None
    use = estimating.stop(num_tokens=1)
    assert (use.total_j, use.estimated) == (pytest.approx(10.0), True)


def test_energy_use_goes_into_json(recorder):
    recorder.add(CPU)
    assert recorder.meter().stop(num_tokens=1).to_dict()["j_per_token"] == {"cpu": None}
