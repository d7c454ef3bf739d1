"""Closed formulas: their known values, and what they must agree with."""

import pytest

from autopipe.core.errors import ConfigError
from autopipe.envs import theory


def test_expected_tokens_is_one_without_acceptance_and_all_with_full_acceptance() -> None:
    assert theory.expected_tokens(0.0, 5) == 1.0
    assert theory.expected_tokens(1.0, 5) == 6.0


def test_expected_tokens_equals_leviathans_closed_form() -> None:
    assert theory.expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


@pytest.mark.parametrize(("acceptance", "window"), [(0.0, 4), (0.3, 1), (0.86, 8), (1.0, 3)])
def test_pipeline_fill_is_the_steady_state_of_its_markov_chain(acceptance: float, window: int) -> None:
    rho = theory.pipeline_fill(acceptance, window)
    leave, enter = 1 - acceptance ** (window + 1), acceptance
    assert rho * leave == pytest.approx((1 - rho) * enter)


@pytest.mark.parametrize("acceptance", [0.01, 0.4, 0.99])
def test_pipelined_tokens_exceed_one_for_any_acceptance(acceptance: float) -> None:
    assert theory.pipelined_tokens(acceptance, 4) > 1


def test_pipelined_tokens_mix_single_steps_and_verifications() -> None:
    rho = theory.pipeline_fill(0.7, 3)
    assert theory.pipelined_tokens(0.7, 3) == pytest.approx(1 - rho + rho * theory.expected_tokens(0.7, 3))


def test_synchronous_speedup_equals_leviathans_theorem_with_flat_times() -> None:
    acceptance, window, cost = 0.75, 5, 0.1
    speedup = theory.synchronous_speedup(acceptance, window, lambda n: cost, lambda n: 1.0)
    assert speedup == pytest.approx((1 - acceptance**6) / ((1 - acceptance) * (window * cost + 1)))


def test_synchronous_tokens_are_the_speedup_with_flat_times() -> None:
    tokens = theory.synchronous_tokens(0.8, 4, speed_ratio=5.0)
    assert tokens == pytest.approx((1 - 0.8**5) / ((1 - 0.8) * (4 / 5 + 1)))
    assert theory.synchronous_speedup(0.8, 4, lambda n: 0.02, lambda n: 0.1) == pytest.approx(tokens)


def test_pipelining_saves_the_wait_for_drafts_where_acceptance_is_high() -> None:
    assert theory.pipelined_tokens(0.9, 8) > theory.synchronous_tokens(0.9, 8, speed_ratio=5.0)


def test_pipelined_step_is_as_long_as_its_slower_side() -> None:
    verify_bound = theory.pipelined_tokens_per_s(1.0, 4, lambda n: 0.01, lambda n: 1.0)
    draft_bound = theory.pipelined_tokens_per_s(1.0, 4, lambda n: 0.5, lambda n: 1.0)
    assert verify_bound == pytest.approx(5.0)
    assert draft_bound == pytest.approx(2.5)


@pytest.mark.parametrize("acceptances", [(0.0, 0.0), (0.5, 0.9), (1.0, 1.0)])
def test_documents_formula_is_degenerate(acceptances: tuple[float, float]) -> None:
    assert theory.document_throughput(acceptances, (0.1, 0.2, 0.4)) == pytest.approx(1 / 0.4)


def test_bad_acceptance_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"acceptance: 1\.5"):
        theory.expected_tokens(1.5, 3)


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan")])
def test_a_bad_speed_ratio_is_refused_by_name(ratio: float) -> None:
    with pytest.raises(ConfigError) as caught:
        theory.synchronous_tokens(0.5, 4, ratio)
    assert caught.value.key == "speed_ratio"
