"""The authors' systems, step by step on texts small enough to count."""

from itertools import accumulate

import pytest

from autopipe.envs.simulator import LatencyCurve, PairTimes, simulate_async_pair, simulate_sync_pair
from autopipe.envs.simulator.authors import POLL_S

TIMES = PairTimes(1.0, LatencyCurve({1: 2.5}))


def test_sync_full_acceptance_emits_the_window_and_no_bonus() -> None:
    result = simulate_sync_pair([True] * 12, 4, TIMES)
    assert result.accepted_tokens == (4, 4, 4)
    assert result.total_s == pytest.approx(3 + 2 * 4 + 3 * (2.5 + 2 * POLL_S))


def test_sync_correction_is_the_first_token_of_the_next_round() -> None:
    agrees = [True, True, False, True, True, True, True, True]
    assert simulate_sync_pair(agrees, 4, TIMES).accepted_tokens == (2, 4, 4)


def test_sync_wrong_first_draft_emits_the_correction_alone() -> None:
    agrees = [True, True, False, True, True]
    assert simulate_sync_pair(agrees, 2, TIMES).accepted_tokens == (2, 1, 2)


def test_async_verifier_that_waits_long_verifies_exactly_its_lookahead() -> None:
    result = simulate_async_pair([True] * 40, 8, TIMES)
    assert set(result.accepted_tokens) == {8}
    assert result.total_s == pytest.approx(40 + 2.5, abs=0.01)


def test_async_verifier_that_does_not_wait_is_locked_to_draft_steps() -> None:
    result = simulate_async_pair([True] * 40, 0, TIMES)
    assert result.accepted_tokens[:3] == (1, 3, 3)


def test_async_rejection_costs_the_steps_drafted_meanwhile() -> None:
    agrees = [True] * 20 + [False] + [True] * 19
    assert simulate_async_pair(agrees, 8, TIMES).total_s > simulate_async_pair([True] * 40, 8, TIMES).total_s + 2


def test_async_correction_is_taken_up_alone_without_lookahead() -> None:
    agrees = [True] * 5 + [False] + [True] * 10
    lengths = simulate_async_pair(agrees, 0, TIMES).accepted_tokens
    starts = list(accumulate(lengths, initial=0))
    assert lengths[starts.index(5)] == 1
