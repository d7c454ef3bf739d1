"""`autopipe policy eval`: every policy on every scenario and seed, side by side, in several processes.

Cells (scenario, policy, seed) are written to a file as they are done, so that a run that was interrupted goes on where
it stopped. The best static plan is chosen with hindsight, for each scenario as a whole: the two dozen that the
closed formulas like best are played on one seed, the better ones on more, the best few on all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from autopipe.core.errors import ConfigError
from autopipe.envs.config import EnvConfig
from autopipe.envs.pipeline_sim import PipelineSimEnv
from autopipe.envs.scenario import Scenario, load_scenario, scenario_names
from autopipe.policies.base import Policy
from autopipe.policies.candidates import candidates
from autopipe.policies.episode import EpisodeResult, run_episode
from autopipe.policies.oracle import OraclePolicy
from autopipe.policies.predict import Machine, Predictor
from autopipe.policies.registry import POLICY_NAMES, make_policy
from autopipe.policies.safety import SafePolicy
from autopipe.policies.static import StaticPolicy

HELDOUT = Path(__file__).parent / "heldout"
FIRST_SEED = 10_000
"""Seeds of evaluation start here; training and tuning use smaller ones."""
CURVE_POINTS = 64
_STATIC_PLANS = 24
"""Static plans that are played, chosen by the formulas."""
_ROUNDS = ((1, 6), (4, 3))
"""Rounds of the choice of the static plan: seeds to play, plans that stay. The last ones are played on all seeds."""
ORACLE, STATIC, OFF = "oracle", "static", "off"
Say = Callable[[int, int], None]


@dataclass(slots=True)
class Cell:
    """One episode.

    Attributes:
        curve_s: seconds of decoding up to each of `CURVE_POINTS` equal shares of the tokens; plain_curve_s: plain
            decoding's.
        energy_j: None where it is not known.
        plan: the static plan, for `static`.
    """

    scenario: str
    policy: str
    seed: int
    relative_goodput: float
    curve_s: list[float]
    plain_curve_s: list[float]
    tokens: int
    energy_j: float | None
    switches: int
    retunes: int
    decision_ms: float
    safety: dict[str, Any] = field(default_factory=dict)
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A cell to be filled."""

    scenario: Scenario
    policy: str
    seed: int
    action: tuple[int, ...] | None = None


def heldout_names() -> list[str]:
    """Scenarios that nothing was tuned or trained on."""
    return sorted(path.stem for path in HELDOUT.glob("*.yaml"))


def find_scenarios(wanted: str) -> list[Scenario]:
    """Scenarios by name or file, separated by commas; `heldout` and `shipped` stand for all of these.

    Raises:
        ConfigError: one that does not exist.
    """
    found: list[Scenario] = []
    for name in wanted.split(","):
        if name == "heldout":
            found += [load_scenario(HELDOUT / f"{each}.yaml") for each in heldout_names()]
        elif name == "shipped":
            found += [load_scenario(each) for each in scenario_names()]
        elif name in heldout_names():
            found.append(load_scenario(HELDOUT / f"{name}.yaml"))
        elif name in scenario_names() or Path(name).suffix in (".yaml", ".yml"):
            found.append(load_scenario(name))
        else:
            known = ", ".join(["heldout", "shipped", *heldout_names(), *scenario_names()])
            raise ConfigError("--scenarios", name, f"a YAML file, or {known}")
    return found


def changes(scenario: Scenario) -> bool:
    """Whether anything about a scenario changes: events, or more than one kind of prompt."""
    kinds = {kind for phase in scenario.phases for kind, weight in phase.kinds.items() if weight > 0}
    return bool(scenario.events) or len(kinds) > 1


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
    store = _Store(cells_file, scenarios)
    with _pool(jobs) as run:
        statics = {each.name: _best_static(each, seeds, run, store) for each in scenarios}
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


def _best_static(scenario: Scenario, seeds: Sequence[int], run: _Runner, store: _Store) -> tuple[int, ...]:
    """The plan with the most goodput over all seeds."""
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
            agreement = np.full((1 + len(codec.menu.adapters), codec.num_slots), 0.5)
            for slot, drafter in enumerate(pipeline.drafters):
                for index, name in enumerate(("", *codec.menu.adapters)):
                    agreement[index, slot] = min(drafter.agreement_on(kind, name), 0.995)
            share = phase.tokens * weight / sum(phase.kinds.values())
            seconds += share * predictor.seconds_per_token(agreement, np.ones(codec.num_slots + 1))
    best = np.argsort(seconds)[:_STATIC_PLANS]
    return [tuple(int(n) for n in plans.actions[index]) for index in dict.fromkeys([0, *best.tolist()])]


_Runner = Callable[[Sequence[Task]], Iterable[tuple[Task, Cell]]]


class _pool:
    """Runs tasks in processes, or here for one job; yields results as they come."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Runner:
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


class _Store:
    """Cells by what they are of, in memory and in a file of JSON lines."""

    def __init__(self, path: Path | None, scenarios: Sequence[Scenario]) -> None:
        self._path = path
        self._hash = {each.name: _hash_of(each) for each in scenarios}
        self._cells: dict[str, Cell] = {}
        self._statics: dict[str, tuple[int, ...]] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                data = json.loads(line)
                if "static" in data:
                    self._statics[data["key"]] = tuple(data["static"])
                else:
                    self._cells[data["key"]] = Cell(**data["cell"])
            except (ValueError, KeyError, TypeError):
                continue  # the last line of a run that was killed

    def get(self, task: Task) -> Cell | None:
        return self._cells.get(self._key(task))

    def goodput(self, task: Task) -> float:
        return self._cells[self._key(task)].relative_goodput

    def put(self, task: Task, cell: Cell, *, keep_on_file: bool = True) -> None:
        self._cells[self._key(task)] = cell
        if keep_on_file:
            self.keep(task)

    def keep(self, task: Task) -> None:
        """Write a cell that is in memory to the file."""
        key = self._key(task)
        self._write({"key": key, "cell": asdict(self._cells[key])})

    def best_static(self, scenario: Scenario, num_seeds: int) -> tuple[int, ...] | None:
        return self._statics.get(f"{self._hash[scenario.name]}/{num_seeds}")

    def note_static(self, scenario: Scenario, num_seeds: int, action: tuple[int, ...]) -> None:
        key = f"{self._hash[scenario.name]}/{num_seeds}"
        self._statics[key] = action
        self._write({"key": key, "static": action})

    def _key(self, task: Task) -> str:
        action = "" if task.action is None else ",".join(map(str, task.action))
        return f"{self._hash[task.scenario.name]}/{task.policy}/{task.seed}/{action}"

    def _write(self, data: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(data) + "\n")


def _hash_of(scenario: Scenario) -> str:
    return sha256(scenario.model_dump_json().encode()).hexdigest()[:12]
