"""Which GPUs NVML reports, under which numbers, and what happens when they or the driver go away."""

import logging
import sys
from types import SimpleNamespace

import pytest

from autopipe.core.telemetry import DeviceKind, NvmlSource, TelemetryUnavailableError

RETRY_AT_ONCE = (0.0, 0.0)


def read_one(source):
    (snapshot,) = source.read()
    return snapshot


def ids(source):
    return [snapshot.device.id for snapshot in source.read()]


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
