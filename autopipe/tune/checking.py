"""The third phase: the best plans run for real."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.bench.workload import spread
from autopipe.core.errors import AutoPipeError
from autopipe.core.plan import Mode
from autopipe.profile import ProfilePrompt
from autopipe.tune import finalists
from autopipe.tune.context import Context
from autopipe.tune.decide import Decision, decide
from autopipe.tune.limits import device_memory
from autopipe.tune.live import LiveBench, OutOfTimeError, models_of
from autopipe.tune.predict import Predictor
from autopipe.tune.race import Arm, new_race_study, race
from autopipe.tune.search import Found

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage

_TRACE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class LiveCheck:
    """What was measured, and what follows from it.

    Attributes:
        study: None where there was no plan to measure.
        arms: the plans, measured on `prompts`.
        traces: Chrome traces of the `winner` and of `plain` decoding, where they could be had.
    """

    study: Study | None
    arms: list[Arm]
    prompts: Sequence[ProfilePrompt]
    decision: Decision
    traces: dict[str, Path]


def check_plans(
    context: Context,
    storage: BaseStorage,
    study_name: str,
    predictor: Predictor,
    ranked: Sequence[Found],
    folder: Path,
) -> LiveCheck:
    """Race the best of `ranked` beside plain decoding, as many and on as many prompts as time allows, and decide.

    Args:
        folder: for traces.
    """
    options, deadline_s = context.options, context.budget.live_deadline_s()
    size = _race_size(context, predictor, deadline_s)
    chosen = finalists.choose(ranked, size.plans, context.goals)
    prompts = spread(context.prompts, size.prompts)
    if not chosen:
        return LiveCheck(None, [], prompts, decide([], prompts, options.limits, context.cost), {})
    arms = [Arm(found, f"plan {place}") for place, found in enumerate(chosen, start=1)]
    study = new_race_study(storage, study_name)
    with LiveBench(options.max_new_tokens, deadline_s, _keep(context, arms, predictor)) as bench:
        race(
            arms,
            context.plain,
            prompts,
            bench,
            study,
            cost=context.cost,
            deadline_s=deadline_s,
            advance=lambda standing: context.progress("live", standing.label, standing.share),
        )
        decision = decide(arms, prompts, options.limits, context.cost)
        bench.deadline_s = context.budget.end_s
        traces = _trace(context, bench, decision.winner, folder)
    return LiveCheck(study, arms, prompts, decision, traces)


def _race_size(context: Context, predictor: Predictor, deadline_s: float) -> finalists.RaceSize:
    """What fits into the time that is left; engines take theirs to start, and the last runs must not be cut short."""
    recorded = predictor.profile.prompts
    plain_s = predictor.predict(context.plain).ms_per_token / 1e3
    run_s = plain_s * sum(len(each.output_ids) for each in recorded) / len(recorded)
    usable_s = 0.9 * (deadline_s - time.monotonic()) - 2 * predictor.profile.engine.start_s
    return finalists.race_size(usable_s, run_s, len(context.prompts))


def _keep(context: Context, arms: Sequence[Arm], predictor: Predictor) -> int:
    """Engines that may be loaded at once: all that are needed, if they fit together."""
    largest: dict[str, dict[str, int]] = {}
    for arm in arms:
        largest.setdefault(models_of(arm.plan), predictor.memory_bytes(arm.plan))
    devices = {device for memory in largest.values() for device in memory}
    capacities = device_memory(devices)
    for device in devices:
        limit = context.options.limits.memory_limit(device, capacities)
        used = sum(memory.get(device, 0) for memory in largest.values())
        if limit is not None and used > limit:
            return 1
    return len(largest)


def _trace(context: Context, bench: LiveBench, winner: Arm | None, folder: Path) -> dict[str, Path]:
    """Traces of the winner and of plain decoding, for a picture; what fails is noted."""
    traces: dict[str, Path] = {}
    if winner is None or context.options.report is None:
        return traces
    plain = winner.plan.replace(mode=Mode.PLAIN, warmup={})
    try:
        for name, plan in (("winner", winner.plan), ("plain", plain)):
            bench.trace(plan, context.prompts[0], _TRACE_TOKENS, folder / f"{name}.json")
            traces[name] = folder / f"{name}.json"
    except (AutoPipeError, OutOfTimeError) as error:
        context.notes.append(f"no timeline: {str(error) or 'time was up'}")
    return traces
