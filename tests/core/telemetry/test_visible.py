import pytest

from autopipe.core.telemetry.visible import (
    PhysicalGpu,
    Visible,
    match_uuids,
    order_is_ambiguous,
    visible_devices,
)

GPUS = [PhysicalGpu("GPU-aa11", "A"), PhysicalGpu("GPU-aa22", "A"), PhysicalGpu("GPU-bb33", "A")]
MIG = [
    PhysicalGpu("GPU-aa11", "A", (("MIG-01", 1, 0), ("MIG-02", 2, 0)), mig_enabled=True),
    PhysicalGpu("GPU-bb33", "A"),
]


def indices(value, gpus=GPUS):
    return [device.gpu for device in visible_devices(value, gpus)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(None, [0, 1, 2], id="unset: all"),
        pytest.param("", [], id="empty: none"),
        pytest.param("2,0", [2, 0], id="order of the list"),
        pytest.param(" 1 , 2 ", [1, 2], id="blanks do not matter"),
        pytest.param("0,2,-1,1", [0, 2], id="negative index ends the list"),
        pytest.param("0,7,1", [0], id="index out of range ends the list"),
        pytest.param("0,x,1", [0], id="no index ends the list"),
        pytest.param("-1", [], id="-1: none"),
        pytest.param("NoDevFiles", [], id="a word: none"),
        pytest.param("1x,0", [1, 0], id="leading digits count"),
        pytest.param("0,1,0", [], id="twice the same: none"),
        pytest.param("GPU-bb33,GPU-aa11", [2, 0], id="UUIDs"),
        pytest.param("GPU-bb", [2], id="UUID prefix"),
        pytest.param("GPU-aa", [], id="ambiguous prefix"),
        pytest.param("GPU-bb33,GPU-zz,GPU-aa11", [2], id="unknown UUID ends the list"),
        pytest.param("GPU-bb33,0", [2], id="index among UUIDs ends the list"),
    ],
)
def test_cuda_visible_devices(value, expected):
    assert indices(value) == expected


@pytest.mark.parametrize(
    "value",
    ["MIG-02", "MIG-GPU-aa11/2/0", "MIG-02,MIG-01"],
    ids=["UUID", "old name", "only the first counts"],
)
def test_mig_device_by_name(value):
    assert visible_devices(value, MIG) == [Visible(0, 1)]


def test_unknown_mig_device_leaves_none():
    assert visible_devices("MIG-99", MIG) == []


def test_index_of_a_gpu_in_mig_mode_means_its_first_instance():
    assert visible_devices("1,0", MIG) == [Visible(1), Visible(0, 0)]


def test_gpu_in_mig_mode_without_instances_is_not_seen():
    assert visible_devices(None, [PhysicalGpu("GPU-aa11", "A", (), mig_enabled=True), GPUS[2]]) == [Visible(1)]


def test_uuids_are_matched_with_and_without_their_prefix():
    assert match_uuids(["bb33", "MIG-02"], MIG) == [Visible(1), Visible(0, 1)]


def test_unknown_uuid_matches_nothing():
    assert match_uuids(["bb33", "cc"], MIG) is None


MIXED = [PhysicalGpu("GPU-1", "A"), PhysicalGpu("GPU-2", "B")]


@pytest.mark.parametrize(
    ("value", "environment", "gpus", "expected"),
    [
        ("0", {}, MIXED, True),
        (None, {}, MIXED, True),
        ("0", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, MIXED, False),
        ("GPU-2", {}, MIXED, False),
        ("0", {}, GPUS, False),
    ],
)
def test_order_of_mixed_gpus_is_ambiguous_unless_by_bus_or_uuid(value, environment, gpus, expected):
    assert order_is_ambiguous(value, environment, gpus) is expected
