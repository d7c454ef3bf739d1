"""The second phase: the simulated search, with all its workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopipe.core.affinity import core_numbers
from autopipe.core.errors import ConfigError
from autopipe.core.plan import StagePlan
from autopipe.profile import Profile
from autopipe.profile.identity import digest
from autopipe.tune.context import Context
from autopipe.tune.limits import device_memory
from autopipe.tune.options import TuneOptions
from autopipe.tune.predict import Predictor
from autopipe.tune.search import Found, SearchSettings, front, open_study, prepare, ranking, run_worker
from autopipe.tune.space import Space
from autopipe.tune.workers import Workers

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage

_SPACE = "space"
"""User attribute of a study: a digest of what its trials choose from, and of the profile behind them."""


def search_plans(
    context: Context, storage: BaseStorage, drafters: Sequence[StagePlan], predictor: Predictor
) -> tuple[Study, list[Found], list[Found]]:
    """Run the search with all its workers.

    Args:
        drafters: that were profiled.

    Returns:
        The study, its feasible plans, the best first, and its front if there are several goals.

    Raises:
        ConfigError: the study of this name is about something else.
    """
    options, profile = context.options, predictor.profile
    space = space_of_profile(options, drafters, profile)
    settings = SearchSettings(
        goals=context.goals,
        sampler=options.sampler,
        seed=options.seed,
        limits=options.limits,
        capacities=device_memory({stage.device for stage in profile.stages}),
    )
    code = digest([repr(space), profile.content_hash, [goal.name for goal in context.goals]])
    study = open_study(storage, options.study_name or f"tune-{code}", settings)
    if study.user_attrs.setdefault(_SPACE, code) != code:
        allowed = "another name: this study is about other models, prompts, threads or tables"
        raise ConfigError("--study-name", study.study_name, allowed)
    study.set_user_attr(_SPACE, code)
    prepare(study, space, options.num_trials)
    deadline_s = context.budget.search_deadline_s(counted=options.num_trials is not None)
    begun = time.monotonic()
    before = _num_finished(study)

    def advance(count: int) -> None:
        by_time = (time.monotonic() - begun) / max(1e-9, deadline_s - begun)
        done = _num_finished(study) - before if options.workers > 1 else count
        by_count = done / options.num_trials if options.num_trials else 0.0
        context.progress("search", f"{done} plans simulated", min(1.0, max(by_time, by_count)))

    endless = options.num_trials is None
    helpers = Workers(
        options.workers - 1,
        storage_url=options.storage or "",
        study_name=study.study_name,
        space=space,
        profile=profile,
        power=context.power,
        settings=settings,
        endless=endless,
        deadline_s=deadline_s,
    )
    with helpers:
        run_worker(
            study,
            space,
            predictor,
            settings,
            endless=endless,
            deadline_s=deadline_s,
            callbacks=context.callbacks,
            advance=advance,
        )
    if helpers.wait():
        context.notes.append("a worker of the search ended early; its trials are put back when the study is resumed")
    _note_waiting(context, study)
    ranked = ranking(study, context.goals)
    return study, ranked, front(study, context.goals) if len(context.goals) > 1 else []


def space_of_profile(options: TuneOptions, drafters: Sequence[StagePlan], profile: Profile) -> Space:
    """What was measured may be chosen; drafters in order of their speed."""
    speed = {stage.name: min(p.seconds for c in stage.curves for p in c.verify) for stage in profile.stages}
    threads = sorted({curves.threads for stage in profile.stages for curves in stage.curves})
    return Space(
        target=options.base.target.replace(threads=None, cores=None, min_drafts=1),
        drafters=tuple(sorted(drafters, key=lambda stage: speed.get(str(stage.name), 0.0))),
        tables=options.tables,
        threads=tuple(threads),
        cores=core_numbers(),
        base=options.base,
    )


def _note_waiting(context: Context, study: Study) -> None:
    from optuna.trial import TrialState

    left = len(study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))
    if left and context.options.num_trials is not None:
        context.notes.append(f"time was up before {left} of the trials were begun; they wait for the next call")


def _num_finished(study: Study) -> int:
    return sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
