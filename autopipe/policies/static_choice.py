"""The best static plan of a scenario, chosen with hindsight: a yardstick.

For each scenario as a whole: the two dozen plans that the closed formulas like best are played on one seed, the better
ones on more, the best few on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from autopipe.envs.config import EnvConfig
from autopipe.envs.pipeline_sim import PipelineSimEnv
from autopipe.envs.scenario import Scenario
from autopipe.policies.candidates import candidates
from autopipe.policies.evaluation_cells import STATIC, Cell, CellStore, Task
from autopipe.policies.predict import Machine, Predictor
from autopipe.policies.truth import true_agreement

_STATIC_PLANS = 24
"""Static plans that are played, chosen by the formulas."""
_ROUNDS = ((1, 6), (4, 3))
"""Rounds of the choice of the static plan: seeds to play, plans that stay. The last ones are played on all seeds."""

Runner = Callable[[Sequence[Task]], Iterable[tuple[Task, Cell]]]


def best_static(scenario: Scenario, seeds: Sequence[int], run: Runner, store: CellStore) -> tuple[int, ...]:
    """The plan with the most goodput over all seeds.

    Args:
        run: plays tasks, and yields them with their cells as they are done.
        store: of the cells; those in it are not played again.
    """
    known = store.best_static(scenario, len(seeds))
    if known is not None:
        return known
    remaining = _promising(scenario)
    for num_seeds, keep in (*_ROUNDS, (len(seeds), 1)):
        tasks = [Task(scenario, STATIC, seed, action) for action in remaining for seed in seeds[:num_seeds]]
        missing = [task for task in tasks if store.get(task) is None]
        for task, cell in run(missing):
            store.put(task, cell, keep_on_file=False)
        means = {
            action: float(np.mean([store.goodput(task) for task in tasks if task.action == action]))
            for action in remaining
        }
        remaining = sorted(remaining, key=lambda action: -means[action])[:keep]
    for seed in seeds:
        store.keep(Task(scenario, STATIC, seed, remaining[0]))
    store.note_static(scenario, len(seeds), remaining[0])
    return remaining[0]


def _promising(scenario: Scenario) -> list[tuple[int, ...]]:
    """The static plans that the formulas like best for the scenario as a whole, without its events."""
    codec = PipelineSimEnv(scenario, EnvConfig()).codec
    plans, pipeline = candidates(codec), scenario.pipeline
    predictor = Predictor(Machine.of(pipeline, codec), plans)
    seconds = np.zeros(len(plans))
    for phase in scenario.phases:
        for kind, weight in phase.kinds.items():
            agreement = true_agreement(pipeline, codec, kind)
            share = phase.tokens * weight / sum(phase.kinds.values())
            seconds += share * predictor.seconds_per_token(agreement, np.ones(codec.num_slots + 1))
    best = np.argsort(seconds)[:_STATIC_PLANS]
    return [tuple(int(n) for n in plans.actions[index]) for index in dict.fromkeys([0, *best.tolist()])]
