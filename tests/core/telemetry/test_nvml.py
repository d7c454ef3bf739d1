"""NVML through the real pynvml, over the pretend driver of fake_nvml.c."""

import logging
import sys
import time
from types import SimpleNamespace

import pytest

from autopipe.core.telemetry import DeviceKind, NvmlSource, TelemetryUnavailableError, ThrottleReason
from autopipe.core.telemetry.nvml_device import throttle_reasons

RETRY_AT_ONCE = (0.0, 0.0)


@pytest.fixture
def opened(nvml):
    """Opens a source over the pretend driver and closes it after the test."""
    sources = []

    def make(**options):
        source = NvmlSource(**options)
        source.open()
        sources.append(source)
        return source

    yield make
    for source in sources:
        source.close()


def read_one(source):
    (snapshot,) = source.read()
    return snapshot


def ids(source):
    return [snapshot.device.id for snapshot in source.read()]


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


def test_gpus_come_in_cudas_order_with_cudas_numbers(nvml, opened):
    for uuid in ("GPU-a", "GPU-b", "GPU-c"):
        nvml.add_gpu(uuid)
    source = opened(environment={"CUDA_VISIBLE_DEVICES": "2,0"})
    assert [(found.device.id, found.device.label) for found in source.read()] == [
        ("GPU-c", "cuda:0"),
        ("GPU-a", "cuda:1"),
    ]


def test_environment_of_the_process_is_the_default(nvml, opened, monkeypatch):
    nvml.add_gpu("GPU-a")
    nvml.add_gpu("GPU-b")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert ids(opened()) == ["GPU-b"]


def test_empty_cuda_visible_devices_leaves_no_gpu(nvml, opened):
    nvml.add_gpu("GPU-a")
    assert opened(environment={"CUDA_VISIBLE_DEVICES": ""}).read() == ()


def test_hidden_gpus_are_never_asked(nvml, opened):
    nvml.add_gpu("GPU-a")
    nvml.add_gpu("GPU-b")
    opened(environment={"CUDA_VISIBLE_DEVICES": "1"}).read()
    assert nvml.num_calls("nvmlDeviceGetPowerUsage", gpu=0) == 0


def test_all_devices_shows_hidden_ones_without_a_cuda_number(nvml, opened):
    nvml.add_gpu("GPU-a")
    nvml.add_gpu("GPU-b")
    source = opened(all_devices=True, environment={"CUDA_VISIBLE_DEVICES": "1"})
    assert [found.device.label for found in source.read()] == ["cuda:0", "GPU-a"]


def test_order_of_a_cuda_that_pytorch_has_started_wins(nvml, opened, monkeypatch):
    nvml.add_gpu("GPU-a")
    nvml.add_gpu("GPU-b")
    uuids = ["b", "a"]
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda index: SimpleNamespace(uuid=uuids[index]),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert ids(opened(environment={})) == ["GPU-b", "GPU-a"]


def test_gpus_of_several_models_without_bus_order_are_warned_about(nvml, opened, caplog):
    nvml.add_gpu("GPU-a", name="Slow")
    nvml.add_gpu("GPU-b", name="Fast")
    opened(environment={})
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in caplog.text


MIG_GPU = {
    "mig_mode": 1,
    "mig": 2,
    "utilisation": None,
    "mig0.uuid": "MIG-x",
    "mig0.name": "Pretend GPU MIG 1g",
    "mig0.memory_total": 100,
    "mig0.memory_used": 10,
    "mig0.gpu_instance": 7,
    "mig0.compute_instance": 0,
    "mig1.uuid": "MIG-y",
    "mig1.memory_total": 200,
    "mig1.memory_used": 20,
    "mig1.gpu_instance": 8,
    "mig1.compute_instance": 0,
}


def test_mig_device_has_its_own_memory_and_its_gpus_temperature(nvml, opened):
    nvml.add_gpu("GPU-a", **MIG_GPU)
    snapshot = read_one(opened())
    assert (snapshot.device.id, snapshot.device.kind, snapshot.device.parent_id) == (
        "MIG-x",
        DeviceKind.MIG,
        "GPU-a",
    )
    assert snapshot.device.name == "Pretend GPU MIG 1g"
    assert (snapshot.memory_used_bytes, snapshot.memory_total_bytes) == (10, 100)
    assert (snapshot.temperature_c, snapshot.clock_mhz) == (55, 1500)


def test_mig_device_has_no_power_or_energy_as_they_are_counted_for_the_whole_gpu(nvml, opened):
    nvml.add_gpu("GPU-a", **MIG_GPU)
    snapshot = read_one(opened())
    assert (snapshot.power_w, snapshot.energy, snapshot.pcie_tx_bytes_per_s) == (None, None, None)


def test_mig_utilisation_comes_from_gpm_or_is_none(nvml, opened):
    nvml.add_gpu("GPU-a", **MIG_GPU)
    source = opened()
    assert read_one(source).utilisation is None
    assert read_one(source).utilisation == 0.41
    assert nvml.num_calls("nvmlGpmMigSampleGet", gpu=0) == 2


def test_mig_device_can_be_chosen_by_uuid(nvml, opened):
    nvml.add_gpu("GPU-a", **MIG_GPU)
    assert read_one(opened(environment={"CUDA_VISIBLE_DEVICES": "MIG-y"})).memory_total_bytes == 200


def test_all_devices_shows_a_mig_gpu_and_its_instances(nvml, opened):
    nvml.add_gpu("GPU-a", **MIG_GPU)
    assert ids(opened(all_devices=True)) == ["MIG-x", "GPU-a", "MIG-y"]


def test_lost_gpu_says_so_and_does_not_hide_the_others(nvml, opened, caplog):
    for uuid in ("GPU-a", "GPU-b", "GPU-c"):
        nvml.add_gpu(uuid)
    source = opened()
    source.read()
    nvml.set({"1.state": 15})
    first, lost, third = source.read()
    assert (first.utilisation, third.utilisation) == (0.4, 0.4)
    assert (lost.device.id, lost.error, lost.utilisation, lost.energy) == ("GPU-b", "GPU is lost", None, None)
    assert "cuda:1 (GPU-b) cannot be read: GPU is lost" in caplog.text


def test_lost_gpu_is_logged_once(nvml, opened, caplog):
    nvml.add_gpu("GPU-a")
    source = opened(retry_s=RETRY_AT_ONCE)
    nvml.set({"0.state": 15})
    for _ in range(4):
        source.read()
    assert caplog.text.count("cannot be read") == 1


@pytest.mark.parametrize("needs_new_session", [0, 1])
def test_gpu_that_comes_back_is_seen_again(nvml, opened, needs_new_session):
    nvml.add_gpu("GPU-a")
    nvml.add_gpu("GPU-b", needs_new_session=needs_new_session)
    source = opened(retry_s=RETRY_AT_ONCE)
    nvml.set({"1.state": 15})
    assert source.read()[1].error is not None
    nvml.set({"1.state": None, "1.energy": 6_000})
    first, back = source.read()
    assert (first.device.id, first.error) == ("GPU-a", None)
    assert (back.device.id, back.device.label, back.error) == ("GPU-b", "cuda:1", None)
    assert back.energy.total_j == 6.0


def test_unsupported_figures_stay_known_over_a_loss(nvml, opened):
    nvml.add_gpu("GPU-a", power=None, needs_new_session=1)
    source = opened(retry_s=RETRY_AT_ONCE)
    source.read()
    nvml.set({"0.state": 15})
    source.read()
    nvml.set({"0.state": None})
    assert read_one(source).error is None
    assert nvml.num_calls("nvmlDeviceGetPowerUsage", gpu=0) == 1


def test_link_rates_do_not_span_a_loss(nvml, opened):
    nvml.add_gpu("GPU-a", field197=100, gpm=None)
    source = opened(retry_s=RETRY_AT_ONCE)
    source.read()
    nvml.set({"0.state": 15})
    source.read()
    nvml.set({"0.state": None, "0.field197": 10_000})
    assert read_one(source).pcie_tx_bytes_per_s is None


def test_lost_gpu_is_not_tried_again_before_its_time(nvml, opened):
    nvml.add_gpu("GPU-a")
    source = opened(retry_s=(3600.0, 3600.0))
    nvml.set({"0.state": 15})
    source.read()
    nvml.set({"0.state": None})
    assert read_one(source).error == "GPU is lost"


def test_gpu_lost_from_the_start_gets_its_uuid_when_it_comes(nvml, opened):
    nvml.add_gpu("GPU-a", state=15)
    nvml.add_gpu("GPU-b")
    source = opened(retry_s=RETRY_AT_ONCE)
    assert ids(source) == ["gpu-0", "GPU-b"]
    nvml.set({"0.state": None})
    back, other = source.read()
    assert (back.device.id, back.device.label, back.error, back.utilisation) == ("GPU-a", "cuda:0", None, 0.4)
    assert other.device.label == "cuda:1"


def test_driver_that_goes_away_and_comes_back_is_used_again(nvml, opened):
    nvml.add_gpu("GPU-a")
    source = opened(retry_s=RETRY_AT_ONCE)
    source.read()
    nvml.set({"0.state": 9, "init": 9})
    assert "driver" in read_one(source).error.lower()
    assert "driver is not loaded" in read_one(source).error
    nvml.set({"0.state": None, "init": None})
    assert read_one(source).error is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (18, "driver and library have different versions"),
        (4, "no permission to use the NVIDIA driver"),
        (9, "driver is not loaded"),
        (999, "NVML does not start: Unknown Error"),
        (77, "NVML does not start: pretended error 77"),
    ],
)
def test_driver_that_does_not_start_is_one_clear_line(nvml, code, words):
    nvml.set({"init": code})
    with pytest.raises(TelemetryUnavailableError, match=words) as caught:
        NvmlSource().open()
    assert "\n" not in str(caught.value)
    assert not caught.value.expected


def test_gpus_that_cannot_be_counted_are_one_clear_line(nvml):
    nvml.set({"count": "!999"})
    with pytest.raises(TelemetryUnavailableError, match="GPUs cannot be listed"):
        NvmlSource().open()


def test_missing_bindings_are_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(TelemetryUnavailableError, match="pip install nvidia-ml-py"):
        NvmlSource().open()


def test_two_sources_share_the_driver(nvml, opened):
    nvml.add_gpu("GPU-a")
    first, second = opened(), opened()
    first.close()
    assert read_one(second).utilisation == 0.4


def test_no_warning_when_nothing_is_wrong(nvml, opened, caplog):
    caplog.set_level(logging.INFO)
    nvml.add_gpu("GPU-a", power=None, gpm=None)
    opened().read()
    assert caplog.records == []
