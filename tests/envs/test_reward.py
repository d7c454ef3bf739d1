"""The reward's terms, one by one."""

import pytest

from autopipe.envs.config import LatencyTargets, RewardWeights
from autopipe.envs.interval import Interval
from autopipe.envs.reward import MAX_RELATIVE, Decision, missed_targets, reward_terms

WEIGHTS = RewardWeights(goodput=1, energy=0.5, latency=2, switch=0.3, retune=0.1, rejected=0.7)


def terms(interval: Interval, decision: Decision | None = None, **targets: float) -> dict[str, float]:
    return reward_terms(interval, decision or Decision(), WEIGHTS, LatencyTargets(**targets))


def decoded(ms_per_token: float = 10.0, **changes: object) -> Interval:
    return Interval(num_tokens=10, decode_tokens=10, decode_s=ms_per_token / 100, plain_s=0.1, **changes)  # type: ignore[arg-type]


def test_twice_as_fast_as_plain_is_two() -> None:
    assert terms(decoded(5.0))["goodput"] == pytest.approx(2)


def test_an_interval_of_first_tokens_alone_counts_as_plain() -> None:
    assert terms(Interval(num_tokens=1))["goodput"] == 1


def test_a_freak_measurement_is_cut_off() -> None:
    assert terms(decoded(1e-6))["goodput"] == MAX_RELATIVE


def test_energy_is_priced_relative_to_plain() -> None:
    assert terms(decoded(energy_j=3.0, plain_energy_j=2.0))["energy"] == pytest.approx(-0.75)


def test_unknown_energy_costs_nothing() -> None:
    assert terms(decoded())["energy"] == 0


def test_switching_costs_more_than_retuning() -> None:
    assert terms(decoded(), Decision(switched=True))["switch"] == pytest.approx(-0.3)
    assert terms(decoded(), Decision(retuned=True))["switch"] == pytest.approx(-0.1)


def test_a_masked_action_is_charged() -> None:
    assert terms(decoded(), Decision(rejected=True))["rejected"] == pytest.approx(-0.7)


def test_missed_targets_are_charged_by_their_share() -> None:
    interval = decoded(12.0, ttfts_s=[0.5, 1.5, 2.5])
    assert missed_targets(interval, LatencyTargets(ttft_s=1.0)) == pytest.approx(2 / 3)
    assert missed_targets(interval, LatencyTargets(ttft_s=1.0, ms_per_token=11)) == pytest.approx(3 / 4)
    assert terms(interval, ttft_s=1.0)["latency"] == pytest.approx(-4 / 3)


def test_without_targets_none_is_missed() -> None:
    assert missed_targets(decoded(1e4, ttfts_s=[1e4]), LatencyTargets()) == 0
