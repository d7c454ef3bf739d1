from __future__ import annotations

import dataclasses
import random

import pytest

from autopipe.tune.cost import SECONDS, TAIL
from autopipe.tune.decide import by_kind, decide
from autopipe.tune.limits import Limits
from autopipe.tune.live import Run
from autopipe.tune.race import Arm
from tests.tune.scenes import PROMPTS, found_plans

FOUND = found_plans(3)


def arm(ratios: list[float], place: int = 0, ttft_s: float = 0.01) -> Arm:
    made = Arm(FOUND[place], f"plan {place + 1}")
    for step, ratio in enumerate(ratios):
        made.runs[step] = Run(tuple(range(10)), ratio, ttft_s, 2.0, None)
        made.plain_runs[step] = Run(tuple(range(10)), 1.0, 0.01, 1.0, None)
    return made


def test_the_fastest_of_those_measured_to_the_end_wins() -> None:
    arms = [arm([0.7] * 8, 0), arm([0.5] * 8, 1), arm([0.4] * 8, 2)]
    arms[2].given_up = "others were better"

    assert decide(arms, PROMPTS, Limits(), SECONDS).winner is arms[1]


def test_a_gain_within_noise_is_no_gain() -> None:
    noise = random.Random(1)
    decision = decide([arm([noise.gauss(0.995, 0.05) for _ in range(8)])], PROMPTS, Limits(), SECONDS)

    assert decision.winner is None
    assert "nothing helps" in decision.reason


def test_where_all_are_slower_it_is_plain_decoding() -> None:
    assert decide([arm([1.02] * 8)], PROMPTS, Limits(), SECONDS).winner is None


def test_a_plan_that_is_slower_on_one_kind_is_not_chosen() -> None:
    mixed = arm([0.4, 1.2] * 4)
    decision = decide([mixed, arm([0.8] * 8, 1)], PROMPTS, Limits(), SECONDS)

    assert mixed.failed is not None
    assert "chat" in mixed.failed
    assert decision.winner is not None
    assert decision.winner.name == "plan 2"


def test_a_measured_figure_beyond_a_limit_counts() -> None:
    late = arm([0.5] * 8, ttft_s=0.5)

    assert decide([late], PROMPTS, Limits(ttft_s=0.2), SECONDS).winner is None
    assert late.failed is not None
    assert "allowed" in late.failed


def test_memory_measured_beyond_its_limit_counts() -> None:
    large, small = arm([0.5] * 8, 0), arm([0.8] * 8, 1)
    for each, most in ((large, 2001), (small, 2000)):
        for step, run in each.runs.items():
            each.runs[step] = dataclasses.replace(run, memory_bytes=most if step == 3 else 1000)

    assert decide([large, small], PROMPTS, Limits(memory_bytes={"cpu": 2000}), SECONDS).winner is small
    assert large.failed == "2001 bytes of memory measured, 2000 allowed"


def test_the_best_that_plain_decoding_won_against_is_told() -> None:
    slower, late = arm([1.02] * 8, 0), arm([0.5] * 8, 1, ttft_s=0.5)

    assert decide([slower, late], PROMPTS, Limits(ttft_s=0.2), SECONDS).best is slower
    assert decide([arm([0.5] * 8, ttft_s=0.5)], PROMPTS, Limits(ttft_s=0.2), SECONDS).best is None


def test_without_a_measurement_it_is_plain_decoding() -> None:
    assert decide([], PROMPTS, Limits(), SECONDS).winner is None


def test_when_time_was_up_the_arms_measured_longest_count() -> None:
    arms = [arm([0.5] * 7, 0), arm([0.3] * 2, 1)]
    for each in arms:
        each.unfinished = True

    assert decide(arms, PROMPTS, Limits(), SECONDS).winner is arms[0]


def test_for_latency_the_slowest_requests_decide() -> None:
    fast_on_most, fast_at_worst = arm([0.3] * 20, 0), arm([0.8] * 20, 1)
    for each in (fast_on_most, fast_at_worst):
        for step in (0, 1, 10, 11):  # slow requests, of both kinds
            each.plain_runs[step] = Run(tuple(range(10)), 5.0, 0.01, 1.0, None)
            each.runs[step] = Run(tuple(range(10)), 5.0 * (0.95 if each is fast_on_most else 0.6), 0.01, 2.0, None)

    assert decide([fast_on_most, fast_at_worst], PROMPTS, Limits(), SECONDS).winner is fast_on_most
    decision = decide([fast_on_most, fast_at_worst], PROMPTS, Limits(), TAIL)
    assert decision.winner is fast_at_worst
    assert "1.67 times as fast as plain decoding on the slowest tenth" in decision.reason


def test_for_latency_a_gain_on_all_but_the_slowest_requests_is_no_gain() -> None:
    useless = arm([0.3] * 20)
    for step in (0, 1, 10, 11):
        useless.plain_runs[step] = Run(tuple(range(10)), 5.0, 0.01, 1.0, None)
        useless.runs[step] = Run(tuple(range(10)), 5.0 + 0.01 * (step % 3 - 1), 0.01, 2.0, None)

    assert decide([useless], PROMPTS, Limits(), SECONDS).winner is useless
    assert decide([useless], PROMPTS, Limits(), TAIL).winner is None


def test_speed_by_kind_is_of_totals() -> None:
    assert by_kind(arm([0.5, 0.25] * 4), PROMPTS) == pytest.approx({"code": 2.0, "chat": 4.0})
