"""Figures of one GPU: NVML through the real pynvml, over the pretend driver of fake_nvml.c."""

import time

import pytest

from autopipe.core.telemetry import DeviceKind, NvmlSource, ThrottleReason
from autopipe.core.telemetry.nvml_device import throttle_reasons


def read_one(source):
    (snapshot,) = source.read()
    return snapshot


def test_every_figure_of_a_gpu_that_has_them(nvml, opened):
    nvml.add_gpu("GPU-a")
    snapshot = read_one(opened())
    assert snapshot.device.kind is DeviceKind.GPU
    assert (snapshot.device.id, snapshot.device.name, snapshot.device.label) == (
        "GPU-a",
        "Pretend GPU",
        "cuda:0",
    )
    assert (snapshot.utilisation, snapshot.memory_utilisation) == (0.4, 0.3)
    assert (snapshot.memory_used_bytes, snapshot.memory_total_bytes) == (250, 1000)
    assert (snapshot.power_w, snapshot.power_limit_w, snapshot.energy.total_j) == (150.0, 400.0, 5.0)
    assert (snapshot.temperature_c, snapshot.clock_mhz, snapshot.memory_clock_mhz) == (55, 1500, 2600)
    assert snapshot.throttle_reasons == ()
    assert snapshot.error is None


def test_figures_change_with_the_device(nvml, opened):
    nvml.add_gpu("GPU-a")
    source = opened()
    source.read()
    nvml.set({"0.utilisation": 90, "0.energy": 7_500})
    snapshot = read_one(source)
    assert (snapshot.utilisation, snapshot.energy.total_j) == (0.9, 7.5)


def test_zero_is_zero_and_not_missing(nvml, opened):
    nvml.add_gpu("GPU-a", utilisation=0, power=0)
    snapshot = read_one(opened())
    assert (snapshot.utilisation, snapshot.power_w) == (0.0, 0.0)


FIGURES = [
    ("power", "power_w", "nvmlDeviceGetPowerUsage"),
    ("energy", "energy", "nvmlDeviceGetTotalEnergyConsumption"),
    ("utilisation", "utilisation", "nvmlDeviceGetUtilizationRates"),
    ("temperature", "temperature_c", "nvmlDeviceGetTemperatureV"),
    ("throttle", "throttle_reasons", "nvmlDeviceGetCurrentClocksEventReasons"),
    ("memory_total", "memory_total_bytes", "nvmlDeviceGetMemoryInfo_v2"),
]


@pytest.mark.parametrize(("key", "attribute", "function"), FIGURES)
def test_unsupported_figure_is_none_and_asked_once(nvml, opened, key, attribute, function):
    nvml.add_gpu("GPU-a", **{key: None, "gpm": None})
    source = opened()
    assert [getattr(read_one(source), attribute) for _ in range(3)] == [None] * 3
    assert nvml.num_calls(function, gpu=0) == 1


def test_supported_figures_are_asked_every_time(nvml, opened):
    nvml.add_gpu("GPU-a", power=None)
    source = opened()
    for _ in range(3):
        source.read()
    assert nvml.num_calls("nvmlDeviceGetTotalEnergyConsumption", gpu=0) == 3


def test_figure_that_needs_permission_is_none_and_the_others_go_on(nvml, opened):
    nvml.add_gpu("GPU-a", power="!4")
    snapshot = read_one(opened())
    assert (snapshot.power_w, snapshot.utilisation, snapshot.error) == (None, 0.4, None)


def test_figure_that_fails_for_a_moment_is_asked_again(nvml, opened):
    nvml.add_gpu("GPU-a", power="!999")
    source = opened()
    assert read_one(source).power_w is None
    nvml.set({"0.power": 80_000})
    assert read_one(source).power_w == 80.0


def test_value_not_available_is_none(nvml, opened):
    nvml.add_gpu("GPU-a", power=0xFFFFFFFF)
    assert read_one(opened()).power_w is None


def test_gpu_that_fails_at_every_figure_says_why(nvml, opened):
    figures = ("memory_total", "utilisation", "power", "power_limit", "energy", "temperature", "clock1")
    broken = dict.fromkeys(figures, "!999") | {
        "clock2": "!999",
        "throttle": "!999",
        "gpm": None,
        "field138": None,
    }
    nvml.add_gpu("GPU-a", **broken, field139=None, field197=None, field198=None)
    nvml.add_gpu("GPU-b")
    broken_gpu, healthy = opened().read()
    assert broken_gpu.error is not None
    assert healthy.utilisation == 0.4


@pytest.mark.parametrize("total", [None, 0], ids=["not supported", "zero"])
def test_memory_of_a_unified_memory_gpu_is_none(nvml, opened, total):
    nvml.add_gpu("GPU-a", memory_total=total)
    snapshot = read_one(opened())
    assert (snapshot.memory_used_bytes, snapshot.memory_total_bytes, snapshot.memory_share) == (
        None,
        None,
        None,
    )
    assert snapshot.utilisation == 0.4


def test_name_that_is_not_utf8_is_shown_as_far_as_it_goes(nvml, opened):
    nvml.add_gpu("GPU-a", name=b"Pretend\xff\xfe GPU")
    assert read_one(opened()).device.name == "Pretend\ufffd\ufffd GPU"


def test_throttle_reasons_are_named(nvml, opened):
    nvml.add_gpu("GPU-a", throttle=0x4 | 0x40)
    snapshot = read_one(opened())
    assert snapshot.throttle_reasons == (ThrottleReason.POWER_CAP, ThrottleReason.HARDWARE_THERMAL)
    assert snapshot.throttled is True


def test_idling_is_not_throttling(nvml, opened):
    nvml.add_gpu("GPU-a", throttle=0x1)
    assert read_one(opened()).throttled is False


def test_reason_newer_than_our_list_is_not_lost():
    assert throttle_reasons(1 << 40) == (ThrottleReason.OTHER,)


def test_nvlink_counters_are_differenced(nvml, opened):
    nvml.add_gpu("GPU-a", field138=100, gpm=None)
    source = opened()
    first = read_one(source)
    nvml.set({"0.field138": 300})
    time.sleep(0.01)
    second = read_one(source)
    assert first.nvlink_tx_bytes_per_s is None
    assert second.nvlink_tx_bytes_per_s == pytest.approx(200 * 1024 / (second.time_s - first.time_s))
    assert second.nvlink_rx_bytes_per_s == 0.0


def test_32_bit_link_counter_may_wrap(nvml, opened):
    nvml.add_gpu("GPU-a", field197=2**32 - 1000, type197=1, gpm=None)
    source = opened()
    first = read_one(source)
    nvml.set({"0.field197": 500})
    time.sleep(0.01)
    second = read_one(source)
    assert second.pcie_tx_bytes_per_s == pytest.approx(1500 / (second.time_s - first.time_s))


def test_link_counter_that_was_reset_is_unknown_once(nvml, opened):
    nvml.add_gpu("GPU-a", field197=1_000_000, gpm=None)
    source = opened()
    source.read()
    nvml.set({"0.field197": 10})
    assert read_one(source).pcie_tx_bytes_per_s is None
    assert read_one(source).pcie_tx_bytes_per_s == 0.0


def test_energy_counter_may_wrap(nvml, opened):
    nvml.add_gpu("GPU-a", energy=2**64 - 1000 - 1)
    source = opened()
    before = read_one(source).energy
    nvml.set({"0.energy": 999})
    after = read_one(source).energy
    assert after.epoch == before.epoch
    assert after.total_j >= before.total_j


def test_energy_counter_that_was_reset_begins_a_new_epoch(nvml, opened):
    nvml.add_gpu("GPU-a", energy=9_000_000)
    source = opened()
    before = read_one(source).energy
    nvml.set({"0.energy": 5})
    after = read_one(source).energy
    assert after.epoch == before.epoch + 1
    assert after.total_j >= before.total_j


NO_LINK_COUNTERS = {"field138": None, "field139": None, "field197": None, "field198": None}


def test_link_rates_come_from_gpm_where_there_are_no_counters(nvml, opened):
    nvml.add_gpu("GPU-a", gpm20=3, gpm21=4, gpm60=5, gpm61=6, **NO_LINK_COUNTERS)
    source = opened()
    source.read()
    snapshot = read_one(source)
    mib = 1 << 20
    assert (snapshot.pcie_tx_bytes_per_s, snapshot.pcie_rx_bytes_per_s) == (3 * mib, 4 * mib)
    assert (snapshot.nvlink_tx_bytes_per_s, snapshot.nvlink_rx_bytes_per_s) == (6 * mib, 5 * mib)


def test_pcie_meter_serves_gpus_with_neither_and_is_asked_at_most_once_a_second(nvml, opened):
    nvml.add_gpu("GPU-a", gpm=None, pcie_tx=7, pcie_rx=8, **NO_LINK_COUNTERS)
    source = opened()
    snapshots = [read_one(source) for _ in range(3)]
    assert {(found.pcie_tx_bytes_per_s, found.pcie_rx_bytes_per_s) for found in snapshots} == {(7000.0, 8000.0)}
    assert nvml.num_calls("nvmlDeviceGetPcieThroughput", gpu=0) == 2
    assert snapshots[-1].nvlink_tx_bytes_per_s is None


def test_gpm_figures_need_two_samples(nvml, opened):
    nvml.add_gpu("GPU-a")
    source = opened()
    first, second = read_one(source), read_one(source)
    assert (first.sm_utilisation, first.sm_occupancy, first.dram_bandwidth_utilisation) == (None, None, None)
    assert (second.sm_utilisation, second.sm_occupancy, second.dram_bandwidth_utilisation) == (
        0.5,
        0.25,
        0.75,
    )


@pytest.mark.parametrize("support", [None, 0], ids=["no such call", "no"])
def test_gpu_without_gpm_is_asked_once(nvml, opened, support):
    nvml.add_gpu("GPU-a", gpm=support)
    source = opened()
    assert [read_one(source).sm_utilisation for _ in range(3)] == [None] * 3
    assert nvml.num_calls("nvmlGpmQueryDeviceSupport", gpu=0) == 1


def test_gpm_metric_that_is_missing_is_none(nvml, opened):
    nvml.add_gpu("GPU-a", gpm3=None, gpm2="nan")
    source = opened()
    source.read()
    snapshot = read_one(source)
    assert (snapshot.sm_utilisation, snapshot.sm_occupancy) == (None, None)
    assert snapshot.dram_bandwidth_utilisation == 0.75


def test_old_driver_gives_what_it_has(load_fake):
    fake = load_fake("-DOLD_DRIVER")
    fake.add_gpu("GPU-a", throttle=0x8)
    source = NvmlSource()
    source.open()
    snapshot = read_one(source)
    source.close()
    assert (snapshot.temperature_c, snapshot.memory_used_bytes) == (55, 250)
    assert snapshot.throttle_reasons == (ThrottleReason.HARDWARE_SLOWDOWN,)
    assert snapshot.sm_utilisation is None
