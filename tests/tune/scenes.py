"""A small space over a profile made by hand, and plans that run without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from autopipe.core.plan import Plan, StagePlan
from autopipe.profile import Profile, ProfilePrompt
from autopipe.tune.live import Run
from autopipe.tune.objective import Objective, goals
from autopipe.tune.predict import Predictor
from autopipe.tune.search import Found, SearchSettings, open_study, prepare, ranking, run_worker
from autopipe.tune.space import Space
from autopipe.tune.storage import open_storage
from tests.profile.samples import BIG, SMALL, sample_profile

TARGET = StagePlan.parse(BIG)
DRAFTER = StagePlan.parse({**SMALL, "name": "small"})
PROMPTS = tuple(ProfilePrompt(f"p{n}", ("code", "chat")[n % 2], (n + 1, 2, 3)) for n in range(8))


def space(**changes: Any) -> Space:
    """One drafter in front of a target, on two cores."""
    return Space(**{"target": TARGET, "drafters": (DRAFTER,), "threads": (1, 2), "cores": (0, 1), **changes})


def settings(**changes: Any) -> SearchSettings:
    return SearchSettings(**{"goals": goals(Objective.THROUGHPUT, has_energy=False), **changes})


def predictor(profile: Profile | None = None) -> Predictor:
    return Predictor(profile or sample_profile())


def found_plans(count: int = 4) -> list[Found]:
    """Plans that draft, from a small search, the best first."""
    study = open_study(open_storage(None), "scene", settings())
    prepare(study, space(), 40)
    run_worker(study, space(), predictor(), settings(), endless=False)
    drafting = [found for found in ranking(study, settings().goals) if found.plan.drafters]
    assert len(drafting) >= count
    return drafting[:count]


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


class FakeRunner:
    """Answers at once; how long a plan is said to take comes from `seconds_of`."""

    def __init__(self, seconds_of: Callable[[Plan, ProfilePrompt], float], *, plain_s: float = 1.0) -> None:
        self._seconds_of = seconds_of
        self._plain_s = plain_s
        self.ran: list[tuple[Plan, str]] = []

    def run(self, plan: Plan, prompt: ProfilePrompt) -> Run:
        self.ran.append((plan, prompt.name))
        seconds = self._plain_s if plan.mode == "plain" else self._seconds_of(plan, prompt)
        return Run(tuple(range(10)), seconds, 0.01, 2.0, None)


EMULATED: dict[str, Any] = {
    "chain": [
        {"model": "emulated", "name": "small", "emulated": {"ms": {1: 0.8}, "agreement": 0.8}},
        {"model": "emulated", "name": "big", "emulated": {"ms": {1: 10, 9: 14}}},
    ]
}
