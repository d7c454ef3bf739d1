import numpy as np
import pytest

from autopipe.policies import SafePolicy, SafetyConfig
from autopipe.policies.static import OffPolicy
from tests.policies.helpers import MEDIUM, SMALL, Scripted, action, info, observation, situation

SMALL_CHAIN, MEDIUM_CHAIN = action(1 << SMALL), action(1 << MEDIUM)
OFF = situation().codec.off()


def guarded(policy: Scripted, **settings: float) -> SafePolicy:
    made = SafePolicy(
        policy,
        SafetyConfig.parse({"dwell_intervals": 0, "cool_down": 0, "far_below": 1, **settings}),
        fallback=OffPolicy,
    )
    made.reset(situation())
    return made


def run(policy: SafePolicy, goodputs: list[float], **facts: object) -> list[list[int]]:
    """Actions chosen when the plan in force yields these goodputs, interval by interval."""
    chosen, current = [], OFF
    for goodput in goodputs:
        current = policy.act(observation(), info(current, goodput=goodput, **facts))
        chosen.append(current.tolist())
    return chosen


def test_what_the_policy_wants_is_done_when_nothing_speaks_against_it() -> None:
    assert run(guarded(Scripted(SMALL_CHAIN)), [1.0]) == [SMALL_CHAIN.tolist()]


def test_numbers_out_of_range_are_clamped() -> None:
    policy = guarded(Scripted(action(2, (2, 99, -3))))
    assert run(policy, [1.0])[0][2] == 4
    assert policy.stats.clamped == 1


def test_a_forbidden_action_is_not_done() -> None:
    mask = situation().codec.masks(None, 0, 1.0, dead=1 << SMALL)
    policy = guarded(Scripted(SMALL_CHAIN))
    assert run(policy, [1.0], action_mask=mask) == [OFF.tolist()]
    assert policy.stats.masked == 1


@pytest.mark.parametrize("wanted", [np.full(8, np.nan), np.array([1.0, 2.0]), None])
def test_nonsense_replaces_the_policy(wanted: object) -> None:
    policy = guarded(Scripted(wanted))
    assert run(policy, [1.0]) == [OFF.tolist()]
    assert policy.stats.replaced_by == "off"
    assert len(policy.stats.errors) == 1


def test_a_policy_that_raises_is_replaced_and_the_error_is_told() -> None:
    policy = guarded(Scripted(SMALL_CHAIN, RuntimeError("broken")))
    assert run(policy, [1.0, 1.5]) == [SMALL_CHAIN.tolist(), OFF.tolist()]
    assert policy.stats.errors == ["RuntimeError: broken"]
    assert "off takes over" in policy.stats.notes[-1]


def test_a_policy_that_raises_in_reset_is_replaced() -> None:
    class Broken(Scripted):
        def reset(self, *_: object, **__: object) -> None:
            raise ValueError("cannot begin")

    assert guarded(Broken(SMALL_CHAIN)).policy.name == "off"


def test_a_chain_stays_for_the_dwell_time() -> None:
    policy = guarded(Scripted(SMALL_CHAIN, MEDIUM_CHAIN), dwell_intervals=2)
    chains = [chosen[0] for chosen in run(policy, [1.0, 1.5, 1.5, 1.5, 1.5])]
    assert chains == [2, 2, 2, 4, 4]


def test_other_settings_of_a_chain_do_not_wait() -> None:
    wider = action(2, (2, 3, 2))
    policy = guarded(Scripted(SMALL_CHAIN, wider), dwell_intervals=5)
    assert run(policy, [1.0, 1.5])[1] == wider.tolist()


def test_a_change_that_promises_too_little_is_not_made() -> None:
    policy = guarded(Scripted(SMALL_CHAIN, MEDIUM_CHAIN, gain=0.01), min_gain=0.05)
    assert [chosen[0] for chosen in run(policy, [1.0, 1.5])] == [2, 2]


def test_goodput_below_the_floor_brings_the_last_good_plan_back_and_says_so() -> None:
    policy = guarded(Scripted(SMALL_CHAIN, SMALL_CHAIN, SMALL_CHAIN, MEDIUM_CHAIN), floor_intervals=2)
    chains = [chosen[0] for chosen in run(policy, [1.0, 1.5, 1.5, 1.5, 0.8, 0.8])]
    assert chains == [2, 2, 2, 4, 4, 2]
    assert policy.stats.floor_breaks == 1
    assert "back to small" in policy.stats.notes[-1]


def test_without_a_good_plan_it_goes_back_to_plain_decoding() -> None:
    policy = guarded(Scripted(SMALL_CHAIN), floor_intervals=2)
    assert [chosen[0] for chosen in run(policy, [1.0, 0.5, 0.5])] == [2, 2, 0]


def test_a_plan_that_broke_the_floor_is_not_tried_again_for_a_while() -> None:
    policy = guarded(Scripted(SMALL_CHAIN), floor_intervals=1, ban_intervals=3)
    chains = [chosen[0] for chosen in run(policy, [1.0, 0.5, 1.0, 1.0, 1.0, 1.0])]
    assert chains == [2, 0, 0, 0, 2, 2]


def test_one_slow_interval_does_not_break_the_floor() -> None:
    policy = guarded(Scripted(SMALL_CHAIN), floor_intervals=4)
    assert [chosen[0] for chosen in run(policy, [1.0, 1.5, 1.5, 1.5, 0.8, 1.5])] == [2] * 6


def test_intervals_under_another_plan_are_not_counted_against_this_one() -> None:
    policy = guarded(Scripted(SMALL_CHAIN), floor_intervals=1)
    for _ in range(3):  # still loading: the plan in force is plain decoding
        chosen = policy.act(observation(), info(OFF, goodput=0.5))
    assert chosen[0] == 2


def test_goodput_far_below_the_floor_is_noticed_in_half_the_time() -> None:
    policy = guarded(Scripted(SMALL_CHAIN), floor_intervals=4, far_below=0.1)
    assert [chosen[0] for chosen in run(policy, [1.0, 0.5, 0.5])] == [2, 2, 0]


def test_without_a_good_plan_nothing_is_tried_for_a_while_and_then_for_longer() -> None:
    script = [SMALL_CHAIN, SMALL_CHAIN, *[MEDIUM_CHAIN] * 6, *[action(1)] * 20]
    policy = guarded(Scripted(*script), floor_intervals=1, cool_down=3)
    chains = [chosen[0] for chosen in run(policy, [1.0, 0.5, 1.0, 1.0, 1.0, 0.5, *[1.0] * 8])]
    assert chains[:5] == [2, 0, 0, 0, 4]
    assert chains[5:11] == [0] * 6
    assert chains[11] == 1


def test_intervals_that_the_policy_itself_disturbs_are_not_judged() -> None:
    class Busy(Scripted):
        busy = True

        @property
        def disturbs(self) -> bool:
            return self.busy

    script = Busy(SMALL_CHAIN)
    policy = guarded(script)

    def intervals(count: int) -> int:
        for _ in range(count):
            policy.act(observation(), info(SMALL_CHAIN, goodput=0.5))
        return policy.stats.floor_breaks

    assert intervals(10) == 0
    script.busy = False
    assert intervals(4) == 0  # the first of them began while it was busy
    assert intervals(1) == 1
