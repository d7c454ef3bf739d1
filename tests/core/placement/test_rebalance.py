"""Layers that move to a neighbour's device."""

from autopipe.core.placement import Candidate, apply_placement, device_map, load_hardware, place, rebalance, sizes_of
from autopipe.core.plan import Dtype, Plan

TARGET = Candidate("8B", sizes_of("llama-3.1-8b"), Dtype.FP16)
DRAFTER = Candidate("1B", sizes_of("llama-3.2-1b"))


def time_of_target(placement):
    stage = placement.stages[-1]
    return sum(part.num_layers / part.device.spec.gb_per_s for part in stage.parts)


def test_layers_move_to_a_faster_neighbour_until_it_no_longer_pays():
    placement = place(load_hardware("4xL4+1xL4"), [DRAFTER, TARGET])
    moved, moves = rebalance(placement, lambda each: len(each.stages[-1].parts))
    assert moves
    assert sum(part.num_layers for part in moved.stages[-1].parts) == 32
    assert any("moved" in note for note in moved.notes)


def test_nothing_moves_when_nothing_is_gained():
    placement = place(load_hardware("2xH100"), [DRAFTER, TARGET])
    moved, moves = rebalance(placement, lambda each: 1.0)
    assert moves == []
    assert moved == placement


def test_a_move_never_overfills_a_device():
    placement = place(load_hardware("1x4090+1xH100"), [DRAFTER, TARGET])
    moved, _ = rebalance(placement, lambda each: 1 / time_of_target(each))
    assert moved.overfull() == []


def test_a_shared_device_is_relieved():
    placement = place(load_hardware("2x4090"), [DRAFTER, Candidate("32B", sizes_of("qwen2.5-32b"), Dtype.INT4)])

    def speed(each):
        return 1 / sum(map(sum, each.contention()))

    moved, moves = rebalance(placement, speed)
    assert moves
    assert speed(moved) > speed(placement)


def test_a_device_map_names_every_module_once():
    placement = place(load_hardware("4xA100-40GB"), [Candidate("70B", sizes_of("llama-3.1-70b"), Dtype.INT4)])
    placed = device_map(placement.stages[0])
    assert {f"model.layers.{index}" for index in range(80)} <= set(placed)
    assert placed["model.embed_tokens"] == 0
    assert placed["lm_head"] == placed["model.layers.79"] == 1


def test_the_head_of_a_tied_model_stays_with_its_embedding():
    placement = place(load_hardware("4xT4"), [Candidate("3B", sizes_of("llama-3.2-3b"), Dtype.FP32)])
    placed = device_map(placement.stages[0])
    assert placed["model.layers.0"] != placed["model.layers.27"]
    assert placed["lm_head"] == placed["model.embed_tokens"]


def test_a_placement_becomes_keys_of_the_plan():
    plan = Plan.parse({"chain": [{"model": "a", "name": "1B"}, {"model": "b", "name": "70B", "dtype": "int4"}]})
    large = Candidate("70B", sizes_of("llama-3.1-70b"), Dtype.INT4)
    placed = apply_placement(plan, place(load_hardware("4xA100-40GB"), [DRAFTER, large]))
    assert placed.chain[0].device.startswith("cuda:")
    assert placed.chain[1].backend == "transformers"
    assert placed.chain[1].device_map is not None
