from typing import Any

import numpy as np
import pytest

from autopipe.envs.menu import Action
from autopipe.policies.rules import RulesConfig, RulesPolicy
from tests.envs.scenes import pipeline
from tests.policies.helpers import MEDIUM, NGRAM, SMALL, action, info, observation, situation

ALL = [
    "initial_windows",
    "elastic_windows",
    "shrink_on_rollbacks",
    "conservative_start",
    "progressive_windows",
    "min_acceptance",
    "speed_ratio",
    "memory_limit",
    "off_arm",
]
WINDOWS = [1, 2, 4, 8, 16]


class Bench:
    """The rules policy with some rules on, shown the same interval over and over."""

    def __init__(self, *rules: str, situation_: Any = None, **figures: Any) -> None:
        self.policy = RulesPolicy(
            RulesConfig.parse({**dict.fromkeys(ALL, False), **dict.fromkeys(rules, True), **figures})
        )
        self.situation = situation_ or situation()
        self.policy.reset(self.situation)
        self.action = self.situation.codec.off()

    def step(self, times: int = 1, *, seen: dict[str, Any] | None = None, **facts: Any) -> Action:
        for _ in range(times):
            self.action = self.policy.act(observation(**(seen or {})), info(self.action, **facts))
        return self.action

    def windows(self) -> list[int]:
        return [WINDOWS[level] for level in self.action[1:4]]

    @property
    def said(self) -> str:
        return self.policy.explain().text


def test_windows_start_at_8_4_2_by_place_in_the_chain() -> None:
    bench = Bench("initial_windows")
    bench.step()
    assert bench.windows() == [8, 4, 2]


def test_without_that_rule_they_start_in_the_middle() -> None:
    bench = Bench()
    bench.step()
    assert bench.windows() == [4, 4, 4]


def test_elastic_windows_grow_with_acceptance_and_shrink_without() -> None:
    bench = Bench("elastic_windows")
    bench.step()
    bench.step(seen={"acceptance_fast": (0.9, 0.6, 0.3)})
    assert bench.windows() == [8, 4, 2]
    assert "window grows" in bench.said


def test_windows_do_not_follow_acceptance_without_the_rule() -> None:
    bench = Bench()
    bench.step(3, seen={"acceptance_fast": (0.9, 0.6, 0.3)})
    assert bench.windows() == [4, 4, 4]


def test_three_roll_backs_in_a_row_shrink_the_upstream_window() -> None:
    bench = Bench("shrink_on_rollbacks")
    bench.step()
    rolled = {"room": np.array([40.0, 40.0, 40.0]), "accepted": np.array([9.0, 2.0, 9.0])}
    bench.step(2, **rolled)
    assert bench.windows() == [4, 4, 4]
    bench.step(1, **rolled)
    assert bench.windows() == [4, 2, 4]


def test_roll_backs_that_are_not_in_a_row_do_not_shrink_it() -> None:
    bench = Bench("shrink_on_rollbacks")
    bench.step()
    rolled = {"room": np.array([0.0, 40.0, 0.0]), "accepted": np.array([0.0, 2.0, 0.0])}
    fine = {"room": np.array([0.0, 40.0, 0.0]), "accepted": np.array([0.0, 30.0, 0.0])}
    for facts in (rolled, rolled, fine, rolled, rolled):
        bench.step(1, **facts)
    assert bench.windows() == [4, 4, 4]


def test_the_first_tokens_of_a_request_are_conservative() -> None:
    bench = Bench("conservative_start")
    plan = bench.situation.codec.plan(bench.step())
    assert plan.warmup.kind == "conservative"
    assert plan.warmup.fraction == 0.05


def test_long_outputs_open_their_windows_progressively() -> None:
    bench = Bench("progressive_windows", "conservative_start", long_tokens=1024)
    bench.step(seen={"position": 0.01}, tokens=32)  # 32 tokens are a hundredth: 3200 in all
    assert bench.situation.codec.plan(bench.action).warmup.kind == "progressive"


def test_short_outputs_do_not() -> None:
    bench = Bench("progressive_windows", "conservative_start", long_tokens=1024)
    bench.step(seen={"position": 0.25}, tokens=32)
    assert bench.situation.codec.plan(bench.action).warmup.kind == "conservative"


def test_no_warm_up_without_those_rules() -> None:
    assert Bench().step()[-2] == 0


def test_a_stage_whose_acceptance_stays_under_60_percent_leaves() -> None:
    bench = Bench("min_acceptance", patience_intervals=3)
    bench.step()
    poor = {"acceptance_fast": (0.9, 0.59, 0.9)}
    bench.step(2, seen=poor)
    assert bench.action[0] == 0b111
    bench.step(1, seen=poor)
    assert bench.action[0] == 0b101
    assert "small stays under 60%" in bench.said


def test_it_is_tried_again_later_and_then_after_longer() -> None:
    bench = Bench("min_acceptance", patience_intervals=1, retry_intervals=4)
    bench.step()
    poor = {"acceptance_fast": (0.9, 0.5, 0.9)}
    times_out = []
    for _ in range(16):
        times_out.append(not int(bench.step(seen=poor)[0]) >> SMALL & 1)
    assert times_out[:3] == [True, True, True]
    first_return = times_out.index(False)
    again = times_out.index(True, first_return)
    assert False not in times_out[again : again + 5]


def test_poor_stages_stay_without_the_rule() -> None:
    assert Bench().step(10, seen={"acceptance_fast": (0.1, 0.1, 0.1)})[0] == 0b111


@pytest.mark.parametrize(
    ("small", "medium", "chain"),
    [
        (0.05, 0.25, 1 << NGRAM | 1 << SMALL | 1 << MEDIUM),  # 5x and 4x apart
        (0.05, 0.5, 1 << NGRAM | 1 << SMALL),  # medium is only twice as fast as the target
        (0.15, 0.25, 1 << NGRAM | 1 << MEDIUM),  # small is not three times as fast as medium
    ],
)
def test_adjacent_stages_are_3_to_5_times_apart(small: float, medium: float, chain: int) -> None:
    bench = Bench("speed_ratio")
    assert bench.step(seen={"step_time": (0.0, small, medium)})[0] == chain


def test_a_stage_beyond_5_times_gives_way_to_one_that_fits_better() -> None:
    three = {"name": "nano", "ms": {1: 0.5}, "agreement": {"other": 0.5}}
    made = situation(pipeline=pipeline(drafters=[three, *pipeline()["drafters"][1:]]))
    bench = Bench("speed_ratio", situation_=made)
    # nano is three times faster than small
    assert bench.step(seen={"step_time": (0.02, 0.0625, 0.25)})[0] == 0b111
    bench = Bench("speed_ratio", situation_=made)
    assert bench.step(seen={"step_time": (0.02, 0.25, 0.1)})[0] & 0b100 == 0  # 10 times, where 4 times is on offer


def test_any_ratio_is_taken_without_the_rule() -> None:
    assert Bench().step(seen={"step_time": (0.0, 0.9, 0.95)})[0] == 0b111


def test_models_take_at_most_80_percent_of_the_memory() -> None:
    tight = situation(pipeline=pipeline(device_memory_gb=9))  # target 4, small 1, medium 3: 8 of 9
    assert Bench("memory_limit", situation_=tight).step()[0] == 1 << NGRAM | 1 << MEDIUM
    assert Bench(situation_=tight).step()[0] == 0b111


def test_goodput_below_plain_decoding_turns_drafting_off() -> None:
    bench = Bench("off_arm", off_patience=2)
    bench.step()
    slow = {"goodput": (0.9 / 4, 0.9 / 4)}
    bench.step(1, seen=slow)
    assert bench.action[0] != 0
    bench.step(1, seen=slow)
    assert bench.action[0] == 0
    assert "off" in bench.said


def test_off_has_hysteresis() -> None:
    bench = Bench("off_arm", off_patience=1, retry_intervals=5)
    bench.step()
    bench.step(1, seen={"goodput": (0.2, 0.2)})
    chains = [int(bench.step(1)[0]) for _ in range(6)]
    assert chains[:4] == [0, 0, 0, 0]
    assert chains[-1] != 0


def test_drafting_goes_on_without_the_rule() -> None:
    assert Bench().step(6, seen={"goodput": (0.1, 0.1)})[0] == 0b111


def test_what_the_mask_forbids_is_left_out() -> None:
    bench = Bench(*ALL)
    mask = bench.situation.codec.masks(None, 0, 1.0, dead=1 << MEDIUM)
    chosen = bench.step(action_mask=mask)
    assert not int(chosen[0]) >> MEDIUM & 1
    assert chosen[0] != 0


def test_decisions_are_canonical_actions() -> None:
    bench = Bench(*ALL)
    chosen = bench.step()
    assert (bench.situation.codec.canonical(chosen) == chosen).all()
    assert action(0).shape == chosen.shape
