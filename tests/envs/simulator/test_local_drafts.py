"""The n-gram drafter in the simulator: what it offers at each position, and how many of that are taken."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.core.errors import ConfigError
from autopipe.core.gating import best_length
from autopipe.core.plan import Mode
from autopipe.envs.simulator import LatencyCurve, LocalDrafts, SimChain, SimRequest, SimStage, kernel, simulate

TARGET = SimStage(LatencyCurve({1: 1.0, 8: 2.0}), prefill_s=0.0)


def offers(
    length: int, right: int, *, positions: int = 100, gate: bool = False, confidence: float = 0.5
) -> LocalDrafts:
    """The same offer at every position."""
    return LocalDrafts(
        np.full(positions, length), np.full(positions, right), np.full((positions, max(length, 1)), confidence), gate
    )


def chain(drafts: LocalDrafts, *, window: int = 7, mode: Mode = Mode.LOCKSTEP, target: SimStage = TARGET) -> SimChain:
    return SimChain((SimStage(LatencyCurve({1: 1.0}), window=window, drafts=drafts), target), mode)


def test_right_offers_are_accepted_up_to_the_window() -> None:
    result = simulate(chain(offers(9, 9), window=4), 101)

    assert result.stages[-1].acceptance_lengths == (0, 1, 0, 0, 0, 20)


def test_wrong_offers_cost_rows_and_add_nothing() -> None:
    result = simulate(chain(offers(7, 0)), 50)

    assert result.stages[-1].forwards == 50
    assert result.total_s == pytest.approx(sum(TARGET.latency.seconds(min(8, 50 - held)) for held in range(1, 50)))


def test_an_offer_in_part_right_is_accepted_that_far() -> None:
    assert simulate(chain(offers(7, 2)), 31).stages[-1].acceptance_lengths == (0, 1, 0, 10)


def test_verify_cap_limits_what_is_taken() -> None:
    capped = SimStage(TARGET.latency, prefill_s=0.0, verify_cap=2)

    assert simulate(chain(offers(7, 7), target=capped), 31).stages[-1].acceptance_lengths == (0, 1, 0, 10)


def test_plain_mode_takes_no_drafts() -> None:
    assert simulate(chain(offers(7, 7), mode=Mode.PLAIN), 20).stages[-1].forwards == 20


def test_lockstep_and_async_are_the_same_for_a_drafter_in_the_targets_process() -> None:
    lockstep, both = (simulate(chain(offers(7, 3), mode=mode), 60) for mode in (Mode.LOCKSTEP, Mode.ASYNC))

    assert lockstep.total_s == both.total_s


def test_gate_holds_back_drafts_that_do_not_pay() -> None:
    gated = simulate(chain(offers(7, 0, gate=True, confidence=0.01)), 50)

    assert gated.stages[-1].proposed == 0


def test_gate_takes_drafts_that_are_certain() -> None:
    gated = simulate(chain(offers(7, 7, gate=True, confidence=1.0)), 81)

    assert gated.stages[-1].acceptance_lengths[8] == 10


def test_the_drafters_time_counts_in_every_step_of_its_consumer() -> None:
    slow = SimStage(LatencyCurve({1: 1.0}), drafts=offers(0, 0), overhead_s=0.5)

    assert simulate(SimChain((slow, TARGET), Mode.LOCKSTEP), 11, skip_prefill=True).total_s == pytest.approx(11 * 1.5)


def test_requests_read_on_in_the_offers() -> None:
    right = np.concatenate([np.zeros(10, dtype=np.int64), np.full(10, 7)])
    drafts = LocalDrafts(np.full(20, 7), right, np.full((20, 7), 0.5), gate=False)
    first, both = (simulate(chain(drafts), [SimRequest(10)] * count) for count in (1, 2))

    assert first.stages[-1].forwards == 10
    assert both.stages[-1].forwards - 10 == 3  # the prefill, 1 + 7, and the last one


def test_a_neural_stage_behind_the_drafter_accepts_only_where_it_agrees() -> None:
    never = SimStage(LatencyCurve({1: 0.1}), 0.0, window=4, prefill_s=0.0)
    stages = (SimStage(LatencyCurve({1: 1.0}), window=4, drafts=offers(4, 4)), never, TARGET)

    assert simulate(SimChain(stages, Mode.LOCKSTEP), 40).stages[0].accepted == 0


def test_drafts_only_in_the_first_stage() -> None:
    with pytest.raises(ConfigError, match="first stage"):
        SimChain((SimStage(TARGET.latency), SimStage(TARGET.latency, drafts=offers(1, 1)), TARGET))


def test_offers_need_a_confidence_for_each_draft() -> None:
    with pytest.raises(ConfigError, match="confidence"):
        LocalDrafts(np.full(3, 2), np.zeros(3, dtype=np.int64), np.zeros((3, 1)))


class _Costs:
    """The table of a curve, in the shape of `StepCosts`."""

    def __init__(self, curve: LatencyCurve) -> None:
        self.seconds = curve.seconds


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_gate_decides_as_the_engines_does(confidence: list[float]) -> None:
    curve = LatencyCurve({1: 1.0, 4: 1.3, 8: 2.0})
    expected = best_length(confidence, _Costs(curve))  # type: ignore[arg-type]

    chosen = kernel.gated_length(len(confidence), 0, np.array([confidence]), curve.table(64)[None])

    assert chosen == expected
