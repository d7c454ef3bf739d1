"""When a pending plan may come into force: a target is exchanged, or its layers moved, between requests only."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from autopipe.core.plan import Plan
from autopipe.core.plan_switch import PlanSwitch


class Ready:
    """A fleet whose stages are always loaded."""

    def forgive(self, plan: Plan) -> None: ...
    def start(self, plan: Plan) -> None: ...

    def ready(self, key: str) -> bool:
        return True


def plan(drafter: dict[str, Any], target: dict[str, Any]) -> Plan:
    stage = {"model": "m", "backend": "transformers"}
    return Plan.parse({"chain": [{**stage, "name": "d", **drafter}, {**stage, "name": "t", **target}]})


ONE, TWO = {"device_map": {"": "cuda:0"}}, {"device_map": {"": "cuda:1"}}


@pytest.mark.parametrize(
    ("before", "after", "waits"),
    [
        (plan(ONE, ONE), plan({**ONE, "window": 7}, ONE), False),
        (plan(ONE, ONE), plan(TWO, ONE), False),
        (plan(ONE, ONE), plan(ONE, TWO), True),
        (plan(ONE, ONE), plan(ONE, {**ONE, "dtype": "fp32"}), True),
    ],
    ids=["windows", "a drafter's layers", "the target's layers", "another target"],
)
def test_what_waits_for_the_request_under_way(before: Plan, after: Plan, waits: bool) -> None:
    switch = PlanSwitch(Ready(), lambda keep: None)  # type: ignore[arg-type]  # all that is asked of a fleet
    switch.start(before, after, Future())
    assert switch.waits_for_idle is waits
    assert (switch.settle(idle=False) is None) is waits
    if waits:
        settled = switch.settle(idle=True)
        assert settled is not None
        assert settled[0] is after
