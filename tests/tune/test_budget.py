from __future__ import annotations

import pytest

from autopipe.core.errors import ConfigError
from autopipe.tune.budget import Budget, parse_budget


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("45", 45), ("1.5m", 90), ("2 m", 120)]
)
def test_times_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "10x", "-5m", "0s", "nan", "inf", "5m later"])
def test_what_is_no_time_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--budget"):
        parse_budget(text)


def test_phases_share_the_budget_and_leave_time_for_the_report() -> None:
    now = [100.0]
    budget = Budget(300.0, clock=lambda: now[0])
    now[0] = 110.0

    assert 100 < budget.profile_deadline_s() < budget.live_deadline_s() < budget.end_s == 400
    assert 110 < budget.search_deadline_s() < budget.live_deadline_s()


def test_a_search_that_begins_late_ends_before_the_live_check_must() -> None:
    now = [0.0]
    budget = Budget(100.0, clock=lambda: now[0])
    now[0] = 95.0

    assert budget.search_deadline_s() <= budget.live_deadline_s()
