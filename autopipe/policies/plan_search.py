"""Optuna in the simulator: the best plan for a pipeline as it is believed to be now."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError
from autopipe.core.plan import Mode
from autopipe.envs.config import EnvConfig, SpaceConfig
from autopipe.envs.menu import OFF, Action, ActionCodec, slots_of
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.scenario import Phase, PipelineModel, Range, Scenario
from autopipe.envs.world import SimWorld

_FINALISTS = 3
_CONFIRM = 2
"""The finalists are compared on so many times as much text, other than that of the search."""


class SearchProblem(UserModel):
    """What to search for; JSON-ready, so that a process of its own can be asked.

    Attributes:
        pipeline: stages with the times and agreement believed now.
        kind: of the text; prompt_tokens, output_tokens: of its requests.
        chains: chains allowed now (bit masks); adapters: adapter numbers that are on the menu.
        current: the action in force; start: actions to try first.
        trials: plans tried; tokens: simulated for each.
    """

    pipeline: PipelineModel
    spaces: SpaceConfig
    kind: PromptKind
    chains: tuple[int, ...] = Field(min_length=1)
    adapters: tuple[int, ...] = (0,)
    current: tuple[int, ...]
    start: tuple[tuple[int, ...], ...] = ()
    trials: int = Field(default=18, ge=1)
    tokens: int = Field(default=384, ge=32)
    prompt_tokens: int = Field(default=256, ge=1)
    output_tokens: int = Field(default=256, ge=1)
    seed: int = Field(default=0, ge=0)


class SearchResult(UserModel):
    """What was found.

    Attributes:
        action: the best plan; seconds_per_token: predicted under it, and under the current plan.
        tried: plans tried.
    """

    action: tuple[int, ...]
    seconds_per_token: float
    current_seconds_per_token: float
    tried: int

    @property
    def gain(self) -> float:
        """Goodput relative to the current plan's, minus 1."""
        return self.current_seconds_per_token / self.seconds_per_token - 1


def search_plan(problem: SearchProblem) -> SearchResult:
    """Search with Optuna's TPE, then compare the finalists on more and other text. Deterministic.

    Raises:
        ConfigError: optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError("--policy", "planner", "an installed optuna (pip install optuna)") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rehearsal = _Rehearsal(problem)
    codec = rehearsal.codec
    seconds: dict[bytes, float] = {}
    actions: dict[bytes, Action] = {}

    def objective(trial: Any) -> float:
        action = codec.canonical(_suggested(trial, problem, codec))
        key = action.tobytes()
        if key not in seconds:
            actions[key] = action
            seconds[key] = rehearsal.seconds_per_token(action, problem.seed, problem.tokens)
        return seconds[key]

    sampler = optuna.samplers.TPESampler(seed=problem.seed, n_startup_trials=6)
    study = optuna.create_study(sampler=sampler)
    first = [problem.current, *problem.start]
    for action in dict.fromkeys(tuple(codec.canonical(action).tolist()) for action in first):
        if action[0] in problem.chains and action[-1] in problem.adapters:
            study.enqueue_trial(_parameters(action, codec))
    study.optimize(objective, n_trials=problem.trials)
    finalists = sorted(seconds, key=lambda key: seconds[key])[:_FINALISTS]
    current = codec.canonical(problem.current)
    chosen = {key: actions[key] for key in finalists} | {current.tobytes(): current}
    confirmed = {
        key: rehearsal.seconds_per_token(action, problem.seed + 1, _CONFIRM * problem.tokens)
        for key, action in chosen.items()
    }
    best = min(finalists, key=lambda key: confirmed[key])
    return SearchResult(
        action=tuple(int(n) for n in actions[best]),
        seconds_per_token=confirmed[best],
        current_seconds_per_token=confirmed[current.tobytes()],
        tried=len(seconds),
    )


class _Rehearsal:
    """Simulates the believed pipeline on text of one kind; every plan meets the same text."""

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self._config = EnvConfig(spaces=problem.spaces)
        self.codec = ActionCodec(problem.spaces, problem.pipeline.menu())

    def seconds_per_token(self, action: Action, seed: int, tokens: int) -> float:
        """Seconds per token, prefills left out."""
        problem = self._problem
        phase = Phase(
            tokens=tokens,
            kinds={problem.kind: 1.0},
            prompt_tokens=Range(low=problem.prompt_tokens, high=problem.prompt_tokens),
            output_tokens=Range(low=problem.output_tokens, high=problem.output_tokens),
        )
        scenario = Scenario(name="rehearsal", pipeline=problem.pipeline, phases=(phase,))
        world = SimWorld(scenario, self._config, self.codec, seed)
        world.apply(action)
        decode_s, count = 0.0, 0
        while not world.done:
            interval = world.run_interval()
            decode_s, count = decode_s + interval.decode_s, count + interval.decode_tokens
        return decode_s / max(count, 1)


def _suggested(trial: Any, problem: SearchProblem, codec: ActionCodec) -> Action:
    spaces = problem.spaces
    action = codec.off()
    action[0] = chain = trial.suggest_categorical("chain", list(problem.chains))
    if chain == OFF:
        return action
    for slot in slots_of(int(chain)):
        action[1 + slot] = trial.suggest_int(f"window-{slot}", 0, len(spaces.windows) - 1)
    action[-3] = mode = trial.suggest_int("mode", 0, len(spaces.modes) - 1)
    if spaces.modes[mode] is Mode.ASYNC:
        action[-4] = trial.suggest_int("min_drafts", 0, len(spaces.min_drafts) - 1)
    if len(problem.adapters) > 1:
        action[-1] = trial.suggest_categorical("adapter", list(problem.adapters))
    return action


def _parameters(action: tuple[int, ...], codec: ActionCodec) -> dict[str, int]:
    """The action as Optuna's parameters."""
    named = {"chain": action[0], "mode": action[-3], "min_drafts": action[-4], "adapter": action[-1]}
    return named | {f"window-{slot}": int(np.asarray(action)[1 + slot]) for slot in range(codec.num_slots)}
