from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autopipe.core.errors import StageError
from autopipe.core.plan import Plan
from autopipe.profile import ProfilePrompt
from autopipe.tune.cost import SECONDS, TAIL
from autopipe.tune.live import OutOfTimeError, Run
from autopipe.tune.predict import plain_plan
from autopipe.tune.race import LEAST_STEPS, Arm, new_race_study, order_prompts, race
from autopipe.tune.storage import open_storage
from tests.tune.scenes import PROMPTS, FakeRunner, found_plans

FOUND = found_plans(6)
PLAIN = plain_plan(FOUND[0].plan)


def place_of(plan: Plan) -> int:
    return next(place for place, found in enumerate(FOUND) if found.plan == plan)


def run_race(runner: Any, count: int = 6, **options: Any) -> tuple[list[Arm], optuna.Study]:
    arms = [Arm(found, f"plan {place}") for place, found in enumerate(FOUND[:count])]
    study = new_race_study(open_storage(None), "t")
    race(arms, PLAIN, options.pop("prompts", PROMPTS), runner, study, **{"cost": SECONDS, **options})
    return arms, study


def by_place(costs: Callable[[int, ProfilePrompt], float]) -> FakeRunner:
    return FakeRunner(lambda plan, prompt: costs(place_of(plan), prompt))


def test_the_fastest_plan_is_measured_on_all_prompts() -> None:
    arms, study = run_race(by_place(lambda place, prompt: 0.5 + 0.1 * abs(place - 2)))

    assert arms[2].given_up is arms[2].failed is None
    assert len(arms[2].runs) == len(PROMPTS)
    assert study.best_trial.user_attrs["search_trial"] == FOUND[2].trial.number
    assert study.best_value == pytest.approx(0.5)


def test_worse_plans_are_given_up_early() -> None:
    arms, study = run_race(by_place(lambda place, prompt: 0.5 + 0.1 * place))

    assert all(arm.given_up for arm in arms[1:])
    assert all(len(arm.runs) < len(PROMPTS) for arm in arms[3:])
    states = [trial.state for trial in study.trials]
    assert states.count(TrialState.PRUNED) == 5
    assert TrialState.RUNNING not in states


def test_for_latency_no_finalist_is_given_up_before_all_its_slow_requests_were_seen() -> None:
    arms, _ = run_race(by_place(lambda place, prompt: 0.5 + 0.1 * place), count=3, cost=TAIL)

    assert all(len(arm.runs) == len(PROMPTS) for arm in arms)
    assert arms[0].ratio(TAIL) == pytest.approx(0.5)


def test_each_measurement_has_plain_decoding_beside_it() -> None:
    runner = by_place(lambda place, prompt: 0.5)
    arms, _ = run_race(runner)

    for arm in arms:
        assert arm.runs.keys() == arm.plain_runs.keys()
    plain_runs = [(plan, name) for plan, name in runner.ran if plan.mode == "plain"]
    assert plain_runs
    assert all(any(other.chain == plan.chain and name == at for other, at in runner.ran) for plan, name in plain_runs)


def test_a_slow_minute_of_the_machine_hurts_nobody() -> None:
    slow = {"now": 1.0}

    class Drifting(FakeRunner):
        def run(self, plan: Plan, prompt: ProfilePrompt) -> Run:
            found = super().run(plan, prompt)
            slow["now"] *= 1.01
            return Run(found.token_ids, found.seconds * slow["now"], 0.01, 2.0, None)

    arms, _ = run_race(Drifting(lambda plan, prompt: 0.5 + 0.05 * place_of(plan)))
    kept = [arm for arm in arms if arm.given_up is None]

    assert arms[0] in kept
    assert arms[0].ratio(SECONDS) == pytest.approx(0.5, rel=0.05)


def test_a_plan_that_fails_is_out_and_the_others_go_on() -> None:
    def costs(place: int, prompt: ProfilePrompt) -> float:
        if place == 0:
            raise StageError("big", "CUDA out of memory")
        return 0.5 + 0.1 * place

    arms, study = run_race(by_place(costs))

    assert arms[0].failed is not None
    assert arms[0].failed.startswith("out of memory")
    assert arms[1].failed is arms[1].given_up is None
    assert [trial.state for trial in study.trials].count(TrialState.FAIL) == 1


def test_models_that_do_not_load_fail_their_plans_only() -> None:
    class Loading(FakeRunner):
        def run(self, plan: Plan, prompt: ProfilePrompt) -> Run:
            if any(stage.name == "small" for stage in plan.chain):
                raise StageError("small", "does not load")
            return super().run(plan, prompt)

    arms, _ = run_race(Loading(lambda plan, prompt: 0.5))

    assert all(arm.failed for arm in arms if any(stage.name == "small" for stage in arm.plan.chain))
    assert all(arm.failed is None for arm in arms if not any(stage.name == "small" for stage in arm.plan.chain))


def test_a_plan_whose_output_differs_is_thrown_out() -> None:
    class Wrong(FakeRunner):
        def run(self, plan: Plan, prompt: ProfilePrompt) -> Run:
            found = super().run(plan, prompt)
            wrong = plan.mode != "plain" and place_of(plan) == 0
            return Run((9, *found.token_ids), found.seconds, 0.01, 2.0, None) if wrong else found

    arms, _ = run_race(Wrong(lambda plan, prompt: 0.5), count=2)

    assert arms[0].failed is not None
    assert "differs" in arms[0].failed
    assert arms[1].failed is None


@pytest.mark.parametrize("cost", [math.nan, math.inf, 0.0])
def test_a_cost_that_is_no_number_fails_the_plan(cost: float) -> None:
    arms, study = run_race(by_place(lambda place, prompt: cost if place == 0 else 0.5), count=2)

    assert arms[0].failed is not None
    assert study.best_value == pytest.approx(0.5)


def test_when_time_is_up_what_was_measured_stays() -> None:
    class Late(FakeRunner):
        def run(self, plan: Plan, prompt: ProfilePrompt) -> Run:
            if len(self.ran) == 7:
                raise OutOfTimeError
            return super().run(plan, prompt)

    arms, study = run_race(Late(lambda plan, prompt: 0.5), count=2)

    assert [arm.unfinished for arm in arms] == [True, True]
    assert len(arms[0].runs) == 3
    assert TrialState.RUNNING not in [trial.state for trial in study.trials]


def test_nothing_is_begun_after_the_deadline() -> None:
    runner = by_place(lambda place, prompt: 0.5)
    run_race(runner, deadline_s=time.monotonic() - 1)

    assert runner.ran == []


def test_any_first_prompts_are_of_all_kinds() -> None:
    prompts = [ProfilePrompt(f"p{n}", "code" if n < 6 else "chat", (n,)) for n in range(8)]
    kinds = [prompts[step].kind for step in order_prompts(prompts)]

    assert kinds[:4] == ["code", "chat", "code", "chat"]


def test_few_prompts_are_measured_several_times() -> None:
    arms, _ = run_race(by_place(lambda place, prompt: 0.5), count=1, prompts=PROMPTS[:2])

    assert len(arms[0].runs) >= LEAST_STEPS


@pytest.mark.parametrize("url", ["sqlite:///{}/s.db", "journal:///{}/s.log"])
def test_a_race_is_kept_in_any_storage(tmp_path: Path, url: str) -> None:
    arms = [Arm(found, f"plan {place}") for place, found in enumerate(FOUND[:2])]
    storage = open_storage(url.format(tmp_path))
    study = new_race_study(storage, "t")
    race(arms, PLAIN, PROMPTS, by_place(lambda place, prompt: 0.5 + place), study, cost=SECONDS)
    kept = optuna.load_study(storage=open_storage(url.format(tmp_path)), study_name="t-live-1")

    assert [trial.state.name for trial in kept.trials] == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert kept.best_trial.params == FOUND[0].trial.params
    assert len(kept.best_trial.intermediate_values) == len(PROMPTS)


def test_every_race_has_a_study_of_its_own() -> None:
    storage = open_storage(None)

    assert [new_race_study(storage, "t").study_name for _ in range(2)] == ["t-live-1", "t-live-2"]
