"""Which stage goes where, and why one does not fit."""

import pytest

from autopipe.core.errors import PlacementError
from autopipe.core.placement import Candidate, load_hardware, parse_hardware, place, sizes_of, weight_bytes
from autopipe.core.plan import Dtype

SMALL = Candidate("1B", sizes_of("llama-3.2-1b"))
MIDDLE = Candidate("8B", sizes_of("llama-3.1-8b"))
LARGE = Candidate("70B", sizes_of("llama-3.1-70b"), Dtype.INT4)


def where(placement):
    return {stage.name: [part.device.name for part in stage.parts] for stage in placement.stages}


def test_the_papers_chain_takes_two_gpus_for_the_target_and_one_for_each_drafter():
    placement = place(load_hardware("4xA100-40GB"), [SMALL, MIDDLE, LARGE])
    devices = where(placement)
    assert [len(devices[name]) for name in ("70B", "8B", "1B")] == [2, 1, 1]
    assert len({name for names in devices.values() for name in names}) == 4


def test_no_device_is_filled_beyond_its_share():
    placement = place(load_hardware("2x4090+1xA100"), [MIDDLE, LARGE])
    for device in placement.hardware.devices:
        assert placement.used(device) <= 0.8 * device.memory_bytes


def test_all_layers_are_placed_once():
    placement = place(load_hardware("4x4090"), [SMALL, LARGE])
    assert len(placement.stages[-1].layers()) == 80


def test_the_target_gets_the_faster_device():
    placement = place(load_hardware("1xL40S+1xH100"), [SMALL, MIDDLE])
    assert where(placement) == {"8B": ["cuda:1"], "1B": ["cuda:0"]}


def test_a_drafter_shares_a_device_when_none_is_left_and_a_note_says_so():
    placement = place(load_hardware("1xH100"), [SMALL, MIDDLE])
    assert where(placement) == {"8B": ["cuda:0"], "1B": ["cuda:0"]}
    assert any("1B shares cuda:0 with 8B" in note for note in placement.notes)


def test_stages_on_one_device_slow_each_other_down_and_stages_apart_do_not():
    assert place(load_hardware("1xH100"), [SMALL, MIDDLE]).contention()[1][0] == pytest.approx(2.0)
    assert place(load_hardware("2xH100"), [SMALL, MIDDLE]).contention()[1][0] == 1.0


def test_a_chain_that_does_not_fit_is_explained_with_numbers_and_a_dtype_that_fits():
    large = Candidate("70B", sizes_of("llama-3.1-70b"), Dtype.BF16)
    with pytest.raises(PlacementError) as caught:
        place(load_hardware("4x4090"), [SMALL, large])
    text = str(caught.value)
    assert "70B (bf16) does not fit: it needs 143." in text
    assert "weights 141.1 GB" in text
    assert "cuda:3 (RTX-4090): 20.6 GB (80% of 25.8 GB)" in text
    assert "with dtype int8 it would fit" in text or "with dtype int4 it would fit" in text


def test_what_took_the_room_is_named():
    tiny = parse_hardware({"devices": [{"kind": "X", "memory_gib": 24, "gb_per_s": 1, "tflops": {"bf16": 1}}]}, "x")
    with pytest.raises(PlacementError, match=r"8B \(bf16\) does not fit[^$]*17\.\d GB taken by target"):
        place(tiny, [MIDDLE, Candidate("target", MIDDLE.sizes)])


def test_a_longer_context_needs_more_devices():
    short = place(load_hardware("4xA100-40GB"), [LARGE], context=2048)
    long = place(load_hardware("4xA100-40GB"), [LARGE], context=131_072)
    assert len(long.stages[0].parts) > len(short.stages[0].parts)


def test_the_head_of_a_tied_model_counts_where_its_embedding_is():
    tied = Candidate("3B", sizes_of("llama-3.2-3b"), Dtype.FP32)
    (stage,) = place(load_hardware("4xT4"), [tied]).stages
    uses = list(stage.memory(4096).values())
    assert len(uses) > 1
    assert sum(use.weights for use in uses) == weight_bytes(tied.sizes, Dtype.FP32, on_cpu=False)
    per_layer = [use.weights / part.num_layers for use, part in zip(uses, stage.parts, strict=True)]
    assert per_layer[0] > per_layer[-1]
