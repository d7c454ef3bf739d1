"""The common window: as long as it pays, and tried again now and then."""

from __future__ import annotations

import pytest

from autopipe.core.gating import StepCosts
from autopipe.core.shared.window_gate import WindowGate

FREE_ROWS = StepCosts({rows: 10e-3 for rows in (1, 2, 4, 8, 16, 32, 64)})
"""As where weights are read once for all rows and nothing else costs: a GPU with few requests."""
DEAR_ROWS = StepCosts({rows: 10e-3 * rows for rows in (1, 2, 4, 8, 16, 32, 64)})


def learned(accepted: int, drafts: int = 4, *, draft_s: float = 1e-3, num_requests: int = 8) -> WindowGate:
    """After many verdicts alike."""
    gate = WindowGate()
    for _ in range(200):
        gate.observe_verdict(drafts, accepted)
        gate.observe_drafting(num_requests, drafts, draft_s * drafts)
    return gate


def window(gate: WindowGate, costs: StepCosts, num_requests: int = 8, most: int = 4) -> int:
    return gate.window(num_requests, most, num_requests, costs)


def test_rates_are_those_of_drafts_that_were_reached() -> None:
    gate = WindowGate()
    for _ in range(500):
        gate.observe_verdict(3, 3)
        gate.observe_verdict(3, 1)
    assert gate.rate(0) == pytest.approx(1.0, abs=0.05)
    assert gate.rate(1) == pytest.approx(0.5, abs=0.05)
    assert gate.rate(2) == pytest.approx(1.0, abs=0.05)


def test_good_drafts_fill_the_window_where_rows_are_free() -> None:
    assert window(learned(4), FREE_ROWS) == 4


def test_drafts_that_are_never_accepted_are_not_made() -> None:
    assert window(learned(0), FREE_ROWS) == 0


def test_even_good_drafts_do_not_pay_where_every_row_costs_as_much_as_the_first() -> None:
    assert window(learned(4), DEAR_ROWS) == 0


def test_a_drafter_as_slow_as_its_target_is_not_gate_it() -> None:
    assert window(learned(4, draft_s=10e-3), FREE_ROWS) == 0
    assert window(learned(4, draft_s=1e-3), FREE_ROWS) == 4


def test_the_window_ends_where_drafts_stop_being_accepted() -> None:
    assert window(learned(2), FREE_ROWS) == 2


def test_one_request_alone_drafts_as_the_plan_says() -> None:
    assert window(learned(0), DEAR_ROWS, num_requests=1) == 4


def test_a_trial_is_due_now_and_then_and_what_it_shows_is_taken_up() -> None:
    gate = learned(0)
    assert window(gate, FREE_ROWS) == 0
    assert sum(gate.trial_is_due() for _ in range(160)) == 10
    for _ in range(200):
        gate.observe_verdict(4, 4)
    assert window(gate, FREE_ROWS) == 4
