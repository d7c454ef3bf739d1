"""Hardware by name, from YAML, and of this machine."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from autopipe.core.errors import ConfigError
from autopipe.core.placement import load_hardware, local_hardware, parse_hardware


def test_a_count_and_a_kind_make_numbered_devices():
    hardware = load_hardware("2x4090+1xA100-80GB")
    assert [device.name for device in hardware.devices] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [device.kind for device in hardware.devices] == ["RTX-4090", "RTX-4090", "A100-80GB"]


def test_devices_of_one_nvlink_kind_are_linked_by_it_and_others_by_pcie():
    assert load_hardware("8xH100").link.gb_per_s == 450
    assert load_hardware("2x4090").link.gb_per_s == 25


def test_a_file_may_describe_a_device_of_its_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "devices:\n  - {kind: X1, count: 2, memory_gib: 10, gb_per_s: 500, tflops: {bf16: 50}}\n"
        "link: {gb_per_s: 5}\ncurves:\n  - {model: llama-3.1-8b, ms: {1: 20}, source: mine}\n"
    )
    hardware = load_hardware(str(path))
    assert hardware.name == "mine"
    assert hardware.devices[1].spec.gb_per_s == 500
    assert hardware.curves[0].ms == {1: 20}


def test_a_figure_in_the_file_overrides_the_table():
    hardware = parse_hardware({"devices": [{"kind": "H100", "memory_gib": 94}]}, "NVL")
    assert hardware.devices[0].spec.memory_gib == 94
    assert hardware.devices[0].spec.gb_per_s == 3350


@pytest.mark.parametrize("text", ["3xFoo", "0xH100", "nothing.yaml", "8xH100+", "99xH100"])
def test_bad_hardware_names_the_option(text):
    with pytest.raises(ConfigError, match="--hardware"):
        load_hardware(text)


def test_an_unknown_kind_says_what_figures_it_needs():
    with pytest.raises(ConfigError, match=r"devices\.0\.kind.*gb_per_s, tflops"):
        parse_hardware({"devices": [{"kind": "X1", "memory_gib": 10}]}, "x")


def test_an_unknown_key_in_a_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"devices\.0\.memory_gb"):
        parse_hardware({"devices": [{"kind": "H100", "memory_gb": 10}]}, "x")


def test_the_papers_system_ships():
    hardware = load_hardware("pipespec-4xA100")
    assert len(hardware.devices) == 4
    assert {curve.model for curve in hardware.curves} == {"llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"}


def test_this_machine_has_a_device():
    assert local_hardware().devices[0].memory_bytes > 0


def test_cpu_means_the_cpu_on_a_machine_with_gpus_too(monkeypatch):
    gpus = list(load_hardware("2xH100").devices)
    monkeypatch.setattr("autopipe.core.placement.hardware._local_gpus", lambda: gpus)
    assert local_hardware().devices == tuple(gpus)
    assert [device.name for device in load_hardware("cpu").devices] == ["cpu"]


def test_of_this_cpus_memory_only_what_is_free_is_ours(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 << 30, available=10 << 30))
    assert load_hardware("cpu").devices[0].memory_bytes == 10 << 30


def stand_in_gpus(monkeypatch, ask_free):
    """Two H100s of 80 GiB each as torch would show them."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", ask_free)


def test_of_a_gpus_memory_only_what_is_free_is_ours_and_its_kind_goes_by_all_of_it(monkeypatch):
    stand_in_gpus(monkeypatch, lambda index: ((70, 30)[index] << 30, 80 << 30))
    devices = local_hardware().devices
    assert [device.memory_bytes >> 30 for device in devices] == [70, 30]
    assert {device.spec.gb_per_s for device in devices} == {3350}


def test_a_gpu_without_room_for_a_context_is_left_out_with_a_warning(monkeypatch, caplog):
    def ask_free(index):
        if index == 0:
            raise RuntimeError("CUDA error: out of memory")
        return 70 << 30, 80 << 30

    stand_in_gpus(monkeypatch, ask_free)
    assert [device.name for device in local_hardware().devices] == ["cuda:1"]
    assert "cuda:0" in caplog.text
