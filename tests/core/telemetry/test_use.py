"""What devices did during a request, and over several."""

from __future__ import annotations

import json
import time

import pytest

from autopipe.core.telemetry import (
    DeviceInfo,
    DeviceKind,
    DeviceSnapshot,
    EnergyCounter,
    EnergyUse,
    Sampler,
    SamplerLease,
    TelemetryUse,
    ThrottleReason,
)
from autopipe.core.telemetry.combine import combine_devices, total_j_per_token
from autopipe.core.telemetry.use import DeviceUse, summarise
from tests.core.telemetry.test_sampler import ScriptedSource

GPU = DeviceInfo("GPU-a", DeviceKind.GPU, "Pretend GPU", ordinal=0)


def readings(*figures):
    return [DeviceSnapshot(GPU, float(index), **each) for index, each in enumerate(figures)]


def test_means_the_most_and_the_highest_are_of_the_readings_in_the_time():
    found = summarise(
        GPU,
        readings(
            {"utilisation": 1.0, "memory_used_bytes": 99, "temperature_c": 99},
            {"utilisation": 0.2, "memory_used_bytes": 5, "temperature_c": 50, "power_w": 100.0},
            {"utilisation": 0.4, "memory_used_bytes": 7, "temperature_c": 40},
            {"utilisation": 1.0, "memory_used_bytes": 99, "temperature_c": 99},
        ),
        start_s=0.5,
        end_s=2.5,
    )
    assert found.utilisation == pytest.approx(0.3)
    assert (found.memory_used_bytes, found.temperature_c, found.power_w, found.num_samples) == (7, 50, 100.0, 2)


def test_of_a_time_shorter_than_the_interval_the_newest_reading_counts():
    found = summarise(GPU, readings({"utilisation": 0.2}, {"utilisation": 0.6}), start_s=1.1, end_s=1.2)
    assert (found.utilisation, found.num_samples) == (0.6, 0)


def test_what_no_reading_has_stays_none():
    found = summarise(GPU, readings({}, {}), start_s=0.0, end_s=9.0)
    assert (found.utilisation, found.power_w, found.throttle_reasons, found.memory_used_bytes) == (None,) * 4


def test_throttle_reasons_of_all_readings_are_told_once():
    power, heat = ThrottleReason.POWER_CAP, ThrottleReason.HARDWARE_THERMAL
    found = summarise(GPU, readings({"throttle_reasons": (power,)}, {"throttle_reasons": (power, heat)}), 0.0, 9.0)
    assert found.throttle_reasons == (power, heat)
    assert json.loads(json.dumps(found.to_dict()))["throttle_reasons"] == ["power_cap", "hardware_thermal"]


def counting_source():
    """A device that takes exactly 50 W."""
    return ScriptedSource(figures=lambda count: {"energy": EnergyCounter(50.0 * time.monotonic())})


def test_a_meter_gives_energy_per_token_by_device_and_in_total():
    with Sampler([counting_source()], interval_s=0.1) as sampler:
        assert sampler.wait(20, sweeps=2)
        meter = sampler.measure_use()
        time.sleep(0.05)
        use = meter.stop(num_tokens=10)
    (device,) = use.devices
    assert device.energy_j == pytest.approx(50 * use.energy.duration_s, rel=0.2)
    assert device.j_per_token == pytest.approx(device.energy_j / 10)
    assert use.energy.total_j_per_token == pytest.approx(device.j_per_token)


def test_a_device_without_a_counter_has_no_energy_but_its_figures():
    with Sampler([ScriptedSource()], interval_s=0.1) as sampler:
        assert sampler.wait(20, sweeps=2)
        (device,) = sampler.measure_use().stop(num_tokens=10).devices
    assert (device.energy_j, device.j_per_token, device.utilisation) == (None, None, 0.5)


def test_energy_may_be_asked_of_a_part_of_the_time():
    with Sampler([counting_source()], interval_s=0.1) as sampler:
        assert sampler.wait(20, sweeps=2)
        meter = sampler.measure_use()
        now_s = time.monotonic()
        use = meter.stop(1, start_s=now_s, end_s=now_s + 0.1)
    assert use.energy.total_j == pytest.approx(5.0, rel=0.01)


def use(seconds, tokens, **figures):
    return TelemetryUse(EnergyUse(seconds, tokens), (DeviceUse(GPU, **figures),))


def test_several_stretches_are_weighted_by_their_length_and_energy_adds_up():
    (found,) = combine_devices(
        [
            use(1.0, 10, utilisation=1.0, energy_j=30.0, memory_used_bytes=3, num_samples=4),
            use(3.0, 30, utilisation=0.2, energy_j=50.0, memory_used_bytes=2, num_samples=12),
        ]
    )
    assert found.utilisation == pytest.approx(0.4)
    assert (found.energy_j, found.j_per_token, found.memory_used_bytes, found.num_samples) == (80.0, 2.0, 3, 16)
    assert total_j_per_token([found]) == 2.0


def test_energy_that_one_stretch_lacks_is_not_made_up():
    (found,) = combine_devices([use(1.0, 10, energy_j=30.0), use(1.0, 10)])
    assert (found.energy_j, found.j_per_token) == (None, None)
    assert total_j_per_token([found]) is None


def test_all_users_of_a_process_share_one_sampler_until_the_last_is_gone():
    first, second = SamplerLease(), SamplerLease()
    assert first.sampler is second.sampler
    first.close()
    first.close()
    assert first.sampler.wait(20)
    third = SamplerLease()
    assert third.sampler is second.sampler
    second.close()
    del third
    fourth = SamplerLease()
    assert fourth.sampler is not second.sampler
    fourth.close()
