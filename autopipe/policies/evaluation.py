"""`autopipe policy eval`: every policy on every scenario and seed, side by side, in several processes.

Cells (scenario, policy, seed) are written to a file as they are done, so that a run that was interrupted goes on where
it stopped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from autopipe.core.errors import ConfigError
from autopipe.envs.pipeline_sim import PipelineSimEnv
from autopipe.envs.scenario import Scenario
from autopipe.policies.base import Policy
from autopipe.policies.episode import EpisodeResult, run_episode
from autopipe.policies.evaluation_cells import CURVE_POINTS, OFF, ORACLE, STATIC, Cell, CellStore, Task
from autopipe.policies.oracle import OraclePolicy
from autopipe.policies.registry import POLICY_NAMES, make_policy
from autopipe.policies.safety import SafePolicy
from autopipe.policies.static import StaticPolicy
from autopipe.policies.static_choice import Runner, best_static

FIRST_SEED = 10_000
"""Seeds of evaluation start here; training and tuning use smaller ones."""
Say = Callable[[int, int], None]


def check_policies(names: Sequence[str]) -> None:
    """Raises ConfigError for a policy that cannot be evaluated, before anything runs."""
    for name in names:
        if name not in (ORACLE, STATIC):
            _make(name, None).close()


def evaluate(
    scenarios: Sequence[Scenario],
    policies: Sequence[str],
    num_seeds: int,
    *,
    jobs: int = 1,
    cells_file: Path | None = None,
    say: Say = lambda done, total: None,
) -> list[Cell]:
    """All cells of scenarios x policies x seeds; `oracle`, the best `static` plan and `off` are always among them.

    Args:
        jobs: processes.
        cells_file: where cells are kept; those in it already are not run again. None: nowhere.
        say: told cells done and cells to do.

    Raises:
        ConfigError: an unknown policy, no seeds, no scenario.
    """
    if num_seeds < 1 or not scenarios:
        raise ConfigError("--seeds", num_seeds, "at least 1, and at least one scenario")
    names = list(dict.fromkeys([ORACLE, STATIC, OFF, *policies]))
    check_policies(names)
    seeds = [FIRST_SEED + index for index in range(num_seeds)]
    store = CellStore(cells_file, scenarios)
    with _pool(jobs) as run:
        statics = {each.name: best_static(each, seeds, run, store) for each in scenarios}
        tasks = [
            Task(scenario, name, seed, statics[scenario.name] if name == STATIC else None)
            for seed in seeds
            for scenario in scenarios
            for name in names
        ]
        missing = [task for task in tasks if store.get(task) is None]
        for done, (task, cell) in enumerate(run(missing)):
            store.put(task, cell)
            say(len(tasks) - len(missing) + done + 1, len(tasks))
    found = (store.get(task) for task in tasks)
    return [each for each in found if each is not None]


def run_task(task: Task) -> Cell:
    """Fill a cell; what the worker processes do."""
    result = run_episode(lambda env: _make(task.policy, env, task.action), task.scenario, task.seed)
    plan = ""
    if task.action is not None:
        plan = PipelineSimEnv(task.scenario).codec.describe(task.action)
    curve_s, plain_curve_s = _curves(result)
    return Cell(
        scenario=task.scenario.name,
        policy=task.policy,
        seed=task.seed,
        relative_goodput=result.relative_goodput,
        curve_s=curve_s,
        plain_curve_s=plain_curve_s,
        tokens=sum(result.tokens),
        energy_j=result.energy_j,
        switches=result.switches,
        retunes=result.retunes,
        decision_ms=result.decision_ms,
        safety=result.safety,
        plan=plan,
    )


# -- parts ------------------------------------------------------------------------------------------------------------


def _make(name: str, env: PipelineSimEnv | None, action: Sequence[int] | None = None) -> Policy:
    """A policy as it is evaluated: behind the safety layer, unless it is a yardstick."""
    if name == ORACLE and env is not None:
        return OraclePolicy(env)
    if name == STATIC:
        return StaticPolicy(action)
    base, _, variant = name.partition(":")
    options: dict[str, Any] = {}
    if base == "planner":
        from autopipe.policies.searcher import InlineSearcher

        options["searcher"] = InlineSearcher()
    elif base == "bandit" and variant:
        options["exploration"] = variant
    elif variant:
        raise ConfigError("--policies", name, f"{', '.join(POLICY_NAMES)}, bandit:ucb, bandit:thompson, or a folder")
    try:
        policy = make_policy(base, "--policies", **options)
    except ValueError as error:
        raise ConfigError("--policies", name, f"bandit:ucb, bandit:thompson, bandit:none ({error})") from None
    return policy if base == OFF else SafePolicy(policy, fallback=lambda: make_policy("rules"))


def _curves(result: EpisodeResult) -> tuple[list[float], list[float]]:
    tokens = np.cumsum([0, *result.tokens])
    at = np.linspace(0, tokens[-1], CURVE_POINTS + 1)[1:]
    curves = (np.interp(at, tokens, np.cumsum([0.0, *seconds])) for seconds in (result.decode_s, result.plain_s))
    measured, plain = ([round(float(value), 6) for value in curve] for curve in curves)
    return measured, plain


class _pool:
    """Runs tasks in processes, or here for one job; yields results as they come."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Runner:
        if self._jobs <= 1:
            return lambda tasks: ((task, run_task(task)) for task in tasks)
        self._executor = ProcessPoolExecutor(self._jobs, get_context("spawn"), initializer=_one_thread)
        return self._run

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, tasks: Sequence[Task]) -> Iterable[tuple[Task, Cell]]:
        if self._executor is None:
            raise RuntimeError("the pool is closed")
        futures = {self._executor.submit(run_task, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        import torch

        torch.set_num_threads(1)
    except ImportError:
        pass
