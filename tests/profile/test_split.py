"""Threads and cores for each stage, chosen by measuring."""

import pytest

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan
from autopipe.profile.split import AS_IT_IS, choose_split, core_splits

EMULATED = {"model": "emulated", "emulated": {"ms": {1: 0.2}}}
PAIR = Plan.parse({"mode": "async", "chain": [{**EMULATED, "name": "drafter"}, {**EMULATED, "name": "target"}]})


def test_two_cores_are_split_in_every_way():
    assert list(core_splits(PAIR, [4, 5])) == [
        AS_IT_IS, "1+1 threads", "1+1 threads, own cores", "1+2 threads", "2+1 threads", "2+2 threads",
    ]  # fmt: skip


def test_own_cores_are_disjoint_and_as_many_as_threads():
    for label, plan in core_splits(PAIR, range(8)).items():
        if label.endswith("own cores"):
            taken = [core for stage in plan.chain for core in stage.cores or ()]
            assert len(taken) == len(set(taken))
            assert all(len(stage.cores or ()) == stage.threads for stage in plan.chain)


def test_many_cores_and_stages_give_a_bounded_number_of_splits():
    chain = [{**EMULATED, "name": str(index)} for index in range(4)]
    splits = core_splits(Plan.parse({"mode": "async", "chain": chain}), range(64))
    assert len(splits) <= 40
    assert "64+64+64+64 threads" in splits


def test_an_ngram_drafter_needs_no_cores():
    plan = Plan.parse({"chain": [{"model": "ngram"}, EMULATED]})
    assert "2 threads" in core_splits(plan, [0, 1])
    assert all(split.chain[0] == plan.chain[0] for split in core_splits(plan, [0, 1]).values())


def test_the_choice_is_one_of_the_splits_and_all_were_measured():
    choice = choose_split(PAIR, [[1, 2, 3]], max_new_tokens=8, rounds=1)
    splits = core_splits(PAIR)
    assert choice.plan == splits[choice.label]
    assert set(choice.ms_per_token) == set(splits)


def test_without_prompts_nothing_is_measured():
    with pytest.raises(ConfigError, match="prompts"):
        choose_split(PAIR, [])
