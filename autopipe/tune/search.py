"""The simulated search: one worker of it, and the trials it leaves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.plan import Plan
from autopipe.tune.claims import ERROR, Heartbeat, ask_for, claim, claim_new, put_back, take_back_lost
from autopipe.tune.limits import Limits
from autopipe.tune.objective import Goal, better_first, values
from autopipe.tune.predict import Prediction, Predictor
from autopipe.tune.samplers import SamplerName, derive_seed, make_sampler
from autopipe.tune.space import Space, TooDeepError, plan_key

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial

PLAN = "plan"
"""User attribute of a trial: its plan, as a mapping."""

Callback = Callable[["Study", "FrozenTrial"], None]
Advance = Callable[[int], None]
"""Told how many trials this worker has finished."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """What all workers of a search share.

    Attributes:
        capacities: bytes of memory by device.
    """

    goals: tuple[Goal, ...]
    sampler: SamplerName = SamplerName.TPE
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    capacities: Mapping[str, int] = field(default_factory=dict)


def open_study(storage: BaseStorage, name: str, settings: SearchSettings) -> Study:
    """The study of this name, made if it is not there; lost trials of earlier calls are put back.

    Raises:
        ConfigError: it is there, and was made for another objective.
    """
    import optuna

    directions = [goal.direction for goal in settings.goals]
    study = optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
    names = [goal.name for goal in settings.goals]
    known = study.metric_names
    if (known is not None and known != names) or [each.name.lower() for each in study.directions] != directions:
        raise ConfigError("--study-name", name, f"another name: this study is about {', '.join(known or ['?'])}")
    if known is None:
        study.set_metric_names(names)
    take_back_lost(study)
    return study


def prepare(study: Study, space: Space, num_trials: int | None) -> None:
    """Ask for trials; a new study begins with plans that are often good.

    Args:
        num_trials: None: as many as time allows; only the first plans are asked for.
    """
    first = [] if study.get_trials(deepcopy=False) else space.first_params()
    ask_for(study, len(first) if num_trials is None else num_trials, first)


def run_worker(
    study: Study,
    space: Space,
    predictor: Predictor,
    settings: SearchSettings,
    *,
    endless: bool,
    deadline_s: float = math.inf,
    callbacks: Sequence[Callback] = (),
    advance: Advance = lambda count: None,
) -> int:
    """Run waiting trials until there are none, or time is up; return how many this worker has run.

    Args:
        endless: when none waits, make new ones, until time is up.
        deadline_s: on the clock of `time.monotonic`; no trial is begun after it.
    """
    count = 0
    with Heartbeat(study) as heartbeat:
        while time.monotonic() < deadline_s:
            trial = claim_new(study) if endless else claim(study)
            if trial is None:
                break
            if count == 0:
                study.sampler = make_sampler(settings.sampler, derive_seed(settings.seed, trial.number))
            with heartbeat.of(trial):
                finished = _run_trial(study, trial, space, predictor, settings)
            count += 1
            if _call_back(study, finished, callbacks):
                break
            advance(count)
    return count


def _call_back(study: Study, trial: FrozenTrial, callbacks: Sequence[Callback]) -> bool:
    """Call the user's callbacks as `study.optimize` would; whether one has called `study.stop()`."""
    study._stop_flag = False
    study._thread_local.in_optimize_loop = True  # else `study.stop()` refuses
    try:
        for callback in callbacks:
            callback(study, trial)
    finally:
        study._thread_local.in_optimize_loop = False
    return study._stop_flag


def _run_trial(study: Study, trial: Trial, space: Space, predictor: Predictor, settings: SearchSettings) -> FrozenTrial:
    """Simulate a trial's plan. What goes wrong with it is its own failure, and never the best."""
    from optuna.trial import TrialState

    try:
        plan = space.plan(space.suggest(trial))
        trial.set_user_attr(PLAN, plan.model_dump(mode="json", exclude_defaults=True))
        found = predictor.predict(plan)
        for name, excess in settings.limits.excesses(found, settings.capacities).items():
            trial.set_constraint(name, excess)
        trial.set_user_attr("figures", found.to_dict())
        results = values(settings.goals, found)
        if not all(map(math.isfinite, results)):
            raise ArithmeticError(f"not a number among {results}")
        return study.tell(trial, results)
    except TooDeepError as error:
        trial.set_user_attr(ERROR, str(error))
        return study.tell(trial, state=TrialState.PRUNED)
    except (AutoPipeError, ArithmeticError, ValueError, MemoryError) as error:
        trial.set_user_attr(ERROR, f"{type(error).__name__}: {error}")
        return study.tell(trial, state=TrialState.FAIL)
    except BaseException:
        put_back(study, trial)
        raise


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that a search has found feasible, with its figures and the trial that found it first."""

    plan: Plan
    prediction: Prediction
    trial: FrozenTrial


def ranking(study: Study, goals: Sequence[Goal]) -> list[Found]:
    """Distinct feasible plans of a study, the best first; of equal ones the shorter chain, then the earlier trial."""
    from optuna.trial import TrialState

    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    feasible = [trial for trial in finished if all(value <= 0 for value in trial.constraints.values())]
    found: dict[str, Found] = {}
    for trial in feasible:
        plan, figures = _parsed(trial)
        found.setdefault(plan_key(plan), Found(plan, Prediction(**figures), trial))

    def order(each: Found) -> tuple[Any, ...]:
        return better_first(goals, each.trial), len(each.plan.chain), each.trial.number

    return sorted(found.values(), key=order)


def front(study: Study, goals: Sequence[Goal]) -> list[Found]:
    """Of several goals: the plans that none beats in all of them; the best in the first goal first."""
    best = {trial.number for trial in study.best_trials}
    return [each for each in ranking(study, goals) if each.trial.number in best]


def _parsed(trial: FrozenTrial) -> tuple[Plan, dict[str, Any]]:
    return Plan.parse(trial.user_attrs[PLAN]), trial.user_attrs["figures"]
