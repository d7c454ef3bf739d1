"""What a drafter is worth, from a profile."""

from __future__ import annotations

import pytest

from autopipe.core.plan import Mode, Plan
from autopipe.drafts.score import acceptance_length, candidate_plans, score
from tests.profile.samples import BIG, SMALL, sample_profile

PLAN = Plan.parse({"chain": [{"model": "ngram"}, SMALL, BIG]})


def test_agreement_counts_positions_after_the_first() -> None:
    small = score(sample_profile(), PLAN).drafters[1]

    assert small.agreement["code"] == pytest.approx(15 / 23)  # 10110110...: 110 eight times without its first
    assert small.agreement["chat"] == 1.0
    assert small.agreement["all"] == pytest.approx(22 / 30)


@pytest.mark.parametrize(("window", "expected"), [(1, 2.0), (3, 4.0), (50, 12.0)])
def test_a_drafter_that_always_agrees_fills_its_window(window: int, expected: float) -> None:
    assert acceptance_length([[True] * 12], window) == expected


def test_a_drafter_that_never_agrees_leaves_one_token_a_step() -> None:
    assert acceptance_length([[False] * 5], 4) == 1.0


def test_a_wrong_draft_ends_a_step() -> None:
    assert acceptance_length([[True, False, True, True, False, True]], 4) == pytest.approx(6 / 3)


def test_the_chance_of_equal_picks_counts_common_right_ones() -> None:
    found = score(sample_profile(), PLAN)

    assert set(found.pairs) == {("ngram", "small")}
    assert 0 < found.pairs["ngram", "small"] <= found.drafters[0].agreement["all"]


def test_a_cost_is_relative_to_the_targets_step() -> None:
    small = score(sample_profile(), PLAN).drafters[1]

    assert small.cost_s == pytest.approx(0.0005)
    assert small.relative_cost == pytest.approx(0.1)


def test_plain_decoding_is_among_the_chains() -> None:
    chains = score(sample_profile(), PLAN).chains

    assert [each.speedup for each in chains if each.plan.mode is Mode.PLAIN] == [pytest.approx(1.0)]
    assert [each.speedup for each in chains] == sorted((each.speedup for each in chains), reverse=True)


def test_chains_of_up_to_two_drafters_are_compared_in_both_modes() -> None:
    drafters = [tuple(stage.model for stage in plan.drafters) for plan in candidate_plans(PLAN)]
    modes = {plan.mode for plan in candidate_plans(PLAN) if len(plan.chain) == 3}

    assert set(drafters) == {(), ("ngram",), ("acme/small",), ("ngram", "acme/small")}
    assert modes == {Mode.LOCKSTEP, Mode.ASYNC}
