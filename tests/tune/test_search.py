from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Mode, Plan
from autopipe.tune.limits import Limits
from autopipe.tune.objective import Objective, goals
from autopipe.tune.predict import Prediction, Predictor
from autopipe.tune.samplers import SamplerName, derive_seed
from autopipe.tune.search import front, open_study, prepare, ranking, run_worker
from autopipe.tune.storage import open_storage
from tests.tune.scenes import predictor, settings, space


def searched(count: int, with_predictor: Predictor | None = None, **changes: Any) -> optuna.Study:
    made = settings(**changes)
    study = open_study(open_storage(None), "s", made)
    prepare(study, space(), count)
    run_worker(study, space(), with_predictor or predictor(), made, endless=False)
    return study


class Odd:
    """A predictor that spoils what it says of some plans."""

    def __init__(self, spoil: Callable[[Plan, Prediction], Prediction]) -> None:
        self._inner = predictor()
        self._spoil = spoil

    def predict(self, plan: Plan) -> Prediction:
        return self._spoil(plan, self._inner.predict(plan))


@pytest.mark.parametrize("sampler", list(SamplerName))
def test_every_sampler_runs_exactly_the_trials_asked(sampler: SamplerName) -> None:
    study = searched(26, sampler=sampler)

    assert len(study.trials) == 26
    assert all(trial.state is TrialState.COMPLETE for trial in study.trials)


def test_a_search_finds_something_better_than_plain_decoding() -> None:
    best = ranking(searched(40), settings().goals)[0]

    assert best.plan.drafters
    assert best.prediction.ms_per_token < predictor().predict(space().plan(space().defaults())).ms_per_token


def test_a_study_that_is_gone_on_with_adds_as_many_and_repeats_no_sample() -> None:
    storage = open_storage(None)
    for count in (20, 15, 15):
        study = open_study(storage, "s", settings(sampler=SamplerName.RANDOM))
        prepare(study, space(), count)
        run_worker(study, space(), predictor(), settings(sampler=SamplerName.RANDOM), endless=False)
    sampled = [tuple(sorted(trial.params.items())) for trial in study.trials[len(space().first_params()) :]]

    assert len(study.trials) == 50
    assert len(set(sampled)) == len(sampled)


def test_seeds_differ_by_the_first_trial_and_repeat_under_the_same() -> None:
    assert derive_seed(0, 0) == derive_seed(0, 0)
    assert len({derive_seed(seed, first) for seed in (0, 1) for first in range(50)}) == 100


def test_the_same_seed_finds_the_same() -> None:
    same = predictor()  # another one would measure the n-gram drafter's own time anew
    one, other = searched(30, same, seed=4), searched(30, same, seed=4)

    assert [trial.params for trial in one.trials] == [trial.params for trial in other.trials]


def test_a_trial_without_a_number_is_failed_and_never_best() -> None:
    def spoil(plan: Plan, found: Prediction) -> Prediction:
        return found if plan.mode is Mode.PLAIN else dataclasses.replace(found, tokens_per_s=float("nan"))

    study = open_study(open_storage(None), "s", settings())
    prepare(study, space(), 12)
    run_worker(study, space(), Odd(spoil), settings(), endless=False)  # type: ignore[arg-type]
    failed = [trial for trial in study.trials if trial.state is TrialState.FAIL]

    assert failed
    assert "not a number" in failed[0].user_attrs["error"]
    assert [found.plan.mode for found in ranking(study, settings().goals)] == [Mode.PLAIN]
    assert study.best_trial.user_attrs["plan"]["mode"] == "plain"


def test_running_out_of_memory_fails_the_trial_and_not_the_search() -> None:
    def spoil(plan: Plan, found: Prediction) -> Prediction:
        if len(plan.chain) > 2:
            raise MemoryError
        return found

    study = open_study(open_storage(None), "s", settings())
    prepare(study, space(), 12)

    assert run_worker(study, space(), Odd(spoil), settings(), endless=False) == 12  # type: ignore[arg-type]
    assert any("MemoryError" in trial.user_attrs.get("error", "") for trial in study.trials)


def test_plans_beyond_a_limit_are_not_ranked() -> None:
    plain = predictor().memory_bytes(space().plan(space().defaults()))["cpu"]
    study = searched(25, limits=Limits(memory_bytes={"cpu": plain}), capacities={"cpu": 1 << 40})

    assert all(len(found.prediction.memory_bytes) == 1 for found in ranking(study, settings().goals))
    assert {sum(not stage.is_ngram for stage in found.plan.chain) for found in ranking(study, settings().goals)} == {1}
    assert any(trial.constraints["memory.cpu"] > 0 for trial in study.trials)


def test_the_ranking_has_every_plan_once() -> None:
    study = searched(10)
    before = len(ranking(study, settings().goals))
    prepare(study, space(), 0)
    study.enqueue_trial(study.trials[0].params)
    run_worker(study, space(), predictor(), settings(), endless=False)

    assert len(ranking(study, settings().goals)) == before


def test_callbacks_see_every_trial_and_may_stop_the_search() -> None:
    seen: list[int] = []

    def stop_after_five(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        seen.append(trial.number)
        if len(seen) == 5:
            study.stop()

    study = open_study(open_storage(None), "s", settings())
    prepare(study, space(), 20)
    run_worker(study, space(), predictor(), settings(), endless=False, callbacks=[stop_after_five])

    assert seen == [0, 1, 2, 3, 4]


def test_an_interrupted_search_puts_its_trial_back() -> None:
    def interrupt(plan: Plan, found: Prediction) -> Prediction:
        raise KeyboardInterrupt

    study = open_study(open_storage(None), "s", settings())
    prepare(study, space(), 3)
    with pytest.raises(KeyboardInterrupt):
        run_worker(study, space(), Odd(interrupt), settings(), endless=False)  # type: ignore[arg-type]

    assert [trial.state.name for trial in study.trials].count("WAITING") == 3


def test_several_goals_give_a_front_in_which_none_beats_another() -> None:
    several = goals(Objective.PARETO, has_energy=False)
    study = searched(40, goals=several, sampler=SamplerName.NSGA2)
    best = front(study, several)

    assert best
    for one in best:
        for other in best:
            faster = one.prediction.tokens_per_s > other.prediction.tokens_per_s
            assert not (
                faster
                and one.prediction.ttft_s <= other.prediction.ttft_s
                and one.prediction.total_memory_bytes <= other.prediction.total_memory_bytes
            )


def test_a_study_about_something_else_is_refused(tmp_path: Path) -> None:
    storage = open_storage(None)
    open_study(storage, "s", settings())

    with pytest.raises(ConfigError, match="--study-name"):
        open_study(storage, "s", settings(goals=goals(Objective.LATENCY, has_energy=False)))


def test_energy_cannot_be_minimized_where_it_is_not_known() -> None:
    with pytest.raises(ConfigError, match="energy counter"):
        goals(Objective.ENERGY, has_energy=False)
    assert len(goals(Objective.PARETO, has_energy=True)) == 4
