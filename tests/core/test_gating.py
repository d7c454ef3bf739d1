"""Step costs, the number of drafts worth verifying, and the running rate."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.core.errors import ConfigError
from autopipe.core.gating import StepCosts, best_length

FLAT = StepCosts(dict.fromkeys(range(1, 65), 0.01))
FUSED = StepCosts({1: 0.011, 2: 0.01155, 4: 0.01254, 8: 0.01474, 16: 0.0231})
SECONDS = st.floats(1e-4, 10)
CONFIDENCES = st.lists(st.floats(0.001, 0.999), max_size=12)


def test_measured_costs_are_returned():
    costs = StepCosts({1: 0.010, 4: 0.012, 16: 0.03})
    assert costs.seconds(1) == pytest.approx(0.010)
    assert costs.seconds(4) == pytest.approx(0.012)
    assert costs.seconds(16) == pytest.approx(0.03)


def test_costs_between_measured_ones_lie_between_them():
    costs = StepCosts({4: 0.012, 8: 0.02})
    assert 0.012 < costs.seconds(6) < 0.02


def test_without_a_measurement_one_observation_sets_the_scale():
    costs = StepCosts()
    costs.observe(1, 3.0)
    assert costs.seconds(1) == pytest.approx(3.0)
    assert 3.0 < costs.seconds(8) < 6.0


def test_costs_converge_to_noisy_observations():
    true = {1: 0.02, 2: 0.028, 5: 0.03, 8: 0.06, 20: 0.2}
    costs, rng = StepCosts(), random.Random(0)
    for _ in range(3000):
        num_tokens = rng.choice(list(true))
        costs.observe(num_tokens, true[num_tokens] * rng.lognormvariate(0, 0.1))
    for num_tokens, seconds in true.items():
        assert costs.seconds(num_tokens) == pytest.approx(seconds, rel=0.1)


def test_a_slower_machine_raises_costs_of_sizes_that_did_not_run():
    costs = StepCosts({1: 0.01, 8: 0.014})
    for _ in range(200):
        costs.observe(1, 0.02)
    assert costs.seconds(8) == pytest.approx(0.028, rel=0.15)


def test_one_stalled_step_hardly_matters():
    costs = StepCosts({1: 0.01, 8: 0.014})
    for _ in range(50):
        costs.observe(1, 0.01)
        costs.observe(8, 0.014)
    costs.observe(8, 5.0)
    assert costs.seconds(8) < 0.0145
    assert costs.seconds(1) < 0.0105


def test_a_stalled_first_observation_is_forgotten():
    costs = StepCosts()
    costs.observe(1, 5.0)
    for _ in range(200):
        costs.observe(1, 0.01)
    assert costs.seconds(1) == pytest.approx(0.01, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 64), SECONDS), max_size=60))
def test_costs_never_fall_with_more_tokens(observations):
    costs = StepCosts()
    for num_tokens, seconds in observations:
        costs.observe(num_tokens, seconds)
    curve = [costs.seconds(n) for n in range(1, 130)]
    assert all(left <= right for left, right in pairwise(curve))
    assert curve[0] > 0


@given(st.dictionaries(st.integers(1, 64), SECONDS))
def test_measurements_in_any_order_give_the_same_costs(measured):
    shuffled = dict(reversed(measured.items()))
    assert StepCosts(measured).seconds(7) == StepCosts(shuffled).seconds(7)


@pytest.mark.parametrize(
    ("num_tokens", "seconds"), [(0, 0.1), (1, 0.0), (1, -1.0), (1, float("nan")), (1, float("inf"))]
)
def test_impossible_observations_are_errors(num_tokens, seconds):
    with pytest.raises(ConfigError):
        StepCosts().observe(num_tokens, seconds)
    with pytest.raises(ConfigError):
        StepCosts({num_tokens: seconds})


def test_costs_of_no_token_are_an_error():
    with pytest.raises(ConfigError, match="num_tokens"):
        StepCosts().seconds(0)


def test_certain_drafts_at_flat_cost_fill_the_window():
    assert best_length([1.0] * 30, FLAT) == 30


def test_hopeless_drafts_are_not_verified():
    assert best_length([0.01] * 8, FUSED) == 0


def test_no_drafts_give_a_plain_step():
    assert best_length([], FUSED) == 0


def test_a_doubtful_draft_ends_the_run():
    assert best_length([0.95, 0.95, 0.01, 0.95, 0.95], FUSED) == 2


def test_a_doubtful_draft_is_worth_it_before_sure_ones():
    assert best_length([0.04], FUSED) == 0
    assert best_length([0.04, *[1.0] * 7], FLAT) == 8


def test_overhead_makes_more_drafts_worthwhile():
    confidence = [0.8] * 12
    assert best_length(confidence, FUSED, overhead_s=0.05) > best_length(confidence, FUSED)


@given(confidence=CONFIDENCES)
def test_it_never_expects_less_than_plain_decoding(confidence):
    num_drafts = best_length(confidence, FUSED)
    expected = chain = 1.0
    for chance in confidence[:num_drafts]:
        chain *= chance
        expected += chain
    assert expected / FUSED.seconds(num_drafts + 1) >= (1 - 1e-9) / FUSED.seconds(1)


@given(confidence=CONFIDENCES)
def test_it_maximises_tokens_per_second(confidence):
    def goodput(num_drafts):
        chain = expected = 1.0
        for chance in confidence[:num_drafts]:
            chain *= chance
            expected += chain
        return expected / FUSED.seconds(num_drafts + 1)

    best = max(goodput(num_drafts) for num_drafts in range(len(confidence) + 1))
    assert goodput(best_length(confidence, FUSED)) == pytest.approx(best)
