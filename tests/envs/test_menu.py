"""Actions stand for plans: their meaning, their masks, and what is refused."""

import numpy as np
import pytest

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Mode, Plan, WarmupKind
from autopipe.envs.config import SpaceConfig
from autopipe.envs.menu import OFF, Action, ActionCodec, DrafterOption, PlanMenu, action_sizes, slots_of
from tests.envs.scenes import emulated_plan, scenario


@pytest.fixture
def codec() -> ActionCodec:
    return ActionCodec(SpaceConfig(), scenario().pipeline.menu())


def action(codec: ActionCodec, chain: int, **numbers: int) -> Action:
    result = codec.off()
    result[0] = chain
    places = {"window0": 1, "window1": 2, "window2": 3, "min_drafts": 4, "mode": 5, "warmup": 6, "adapter": 7}
    for name, number in numbers.items():
        result[places[name]] = number
    return result


def test_sizes_are_those_documented() -> None:
    assert action_sizes(SpaceConfig()) == [8, 5, 5, 5, 3, 2, 3, 2]


def test_chain_number_is_a_bit_mask_of_slots() -> None:
    assert slots_of(0b101) == [0, 2]
    assert slots_of(OFF) == []


def test_an_action_becomes_the_plan_it_describes(codec: ActionCodec) -> None:
    plan = codec.plan(action(codec, 0b110, window1=3, window2=1, min_drafts=1, mode=1, warmup=2))
    assert plan.names() == ["small", "medium", "target"]
    assert [stage.window for stage in plan.drafters] == [8, 2]
    assert plan.chain[1].min_drafts == 2
    assert plan.mode is Mode.ASYNC
    assert plan.warmup.kind is WarmupKind.PROGRESSIVE


def test_min_drafts_never_exceed_the_window_before(codec: ActionCodec) -> None:
    plan = codec.plan(action(codec, 0b010, window1=0, min_drafts=2, mode=1))
    assert plan.target.min_drafts == 1
    Plan.parse(plan.model_dump())  # the plan's own validation agrees


def test_off_is_plain_decoding_with_the_resident_drafters_loaded(codec: ActionCodec) -> None:
    plan = codec.plan(codec.off(), resident_chain=0b010)
    assert plan.mode is Mode.PLAIN
    assert plan.names() == ["small", "target"]


def test_an_adapter_goes_to_the_drafters_that_have_it(codec: ActionCodec) -> None:
    plan = codec.plan(action(codec, 0b110, adapter=1))
    assert [stage.adapter for stage in plan.drafters] == ["chat", None]


def test_every_action_is_a_valid_plan(codec: ActionCodec) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        Plan.parse(codec.plan(rng.integers(0, codec.sizes)).model_dump())


def test_numbers_that_cannot_matter_are_ignored(codec: ActionCodec) -> None:
    one = codec.canonical(action(codec, 0b001, window1=4, min_drafts=2, mode=0, adapter=1))
    other = codec.canonical(action(codec, 0b001, window1=0, min_drafts=0, mode=0, adapter=0))
    assert one.tolist() == other.tolist()


def test_all_ways_to_be_off_are_the_same(codec: ActionCodec) -> None:
    assert codec.canonical(action(codec, OFF, window0=4, mode=1, warmup=2)).tolist() == codec.off().tolist()


@pytest.mark.parametrize("bad", [[0] * 7, [8, 0, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0, 0]])
def test_what_is_not_an_action_is_refused(codec: ActionCodec, bad: list[int]) -> None:
    with pytest.raises(ConfigError, match="action"):
        codec.canonical(bad)


def test_chains_that_do_not_fit_memory_are_masked(codec: ActionCodec) -> None:
    mask = codec.masks(10 * 10**9, 0, share=0.75)  # 7.5 GB: target 4, small 1, medium 3
    assert mask[:8].tolist() == [True, True, True, True, True, True, False, False]


def test_memory_taken_by_others_counts(codec: ActionCodec) -> None:
    mask = codec.masks(10 * 10**9, 4 * 10**9, share=0.8)
    assert mask[:8].tolist() == [True, True, False, False, False, False, False, False]


def test_off_is_never_masked(codec: ActionCodec) -> None:
    assert codec.masks(1, 10**12, share=0.1, dead=0b111)[0]


def test_dead_drafters_are_masked(codec: ActionCodec) -> None:
    assert codec.masks(None, 0, 0.8, dead=0b010)[:8].tolist() == [True, True, False, False, True, True, False, False]


def test_unused_slots_and_adapters_are_masked() -> None:
    codec = ActionCodec(SpaceConfig(), PlanMenu.from_plan(emulated_plan()))
    mask = codec.masks(None, 0, 0.8)
    assert mask[:8].tolist() == [True] * 4 + [False] * 4
    assert mask[-2:].tolist() == [True, False]


def test_a_menu_may_restrict_its_chains() -> None:
    menu = scenario().pipeline.menu().replace(chains=(0b001,))
    assert ActionCodec(SpaceConfig(), menu).masks(None, 0, 0.8)[:8].tolist() == [True, True] + [False] * 6


def test_the_mask_is_the_callers_own(codec: ActionCodec) -> None:
    codec.masks(None, 0, 0.8)[:] = False
    assert codec.masks(None, 0, 0.8).any()


def test_one_hot_marks_each_number_once(codec: ActionCodec) -> None:
    flat = codec.one_hot(action(codec, 5, mode=1))
    assert flat.sum() == len(codec.sizes)
    assert flat[5] == 1
    assert np.flatnonzero(flat)[5] == 8 + 15 + 3 + 1


def test_more_drafters_than_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match="drafter_slots"):
        ActionCodec(SpaceConfig(drafter_slots=2), scenario().pipeline.menu())


def test_an_ngram_drafter_belongs_into_the_first_slot() -> None:
    option = {"stage": {"model": "ngram"}}
    with pytest.raises(ConfigError, match="first slot"):
        PlanMenu.parse({"target": {"model": "m"}, "drafters": [{"stage": {"model": "a"}}, option]})


def test_an_unknown_adapter_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapters"):
        PlanMenu(
            target=emulated_plan().target,
            drafters=(DrafterOption(stage=emulated_plan().chain[0], adapters={"x": "x"}),),
        )


def test_describe_names_chain_and_settings(codec: ActionCodec) -> None:
    assert codec.describe(action(codec, 0b010, window1=3, mode=1)) == "small(8) > target, async, min 1, warm-up none"
    assert codec.describe(codec.off()) == "off"
