"""Small situations, observations and infos for the tests of policies."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopipe.envs import EnvConfig, PipelineSimEnv
from autopipe.envs.menu import Action, ActionCodec
from autopipe.envs.observation import Observation, observation_sizes
from autopipe.envs.scenario import Scenario
from autopipe.policies.base import Info, Policy, Reason, Situation
from tests.envs.scenes import scenario

NGRAM, SMALL, MEDIUM = 0, 1, 2


def situation(**changes: Any) -> Situation:
    """That of `tests.envs.scenes.scenario`: an n-gram drafter, a small and a medium one; the profile is true."""
    made = scenario(**changes)
    config = EnvConfig()
    return Situation(config, ActionCodec(config.spaces, made.pipeline.menu()), made.pipeline)


def action(chain: int, windows: tuple[int, int, int] = (2, 2, 2), *, mode: int = 0, adapter: int = 0) -> Action:
    return np.array([chain, *windows, 0, mode, 0, adapter], dtype=np.int64)


def observation(**parts: Any) -> Observation:
    """All zeros but for `parts`; nothing is missing but what they say."""
    made = {name: np.zeros(size, dtype=np.float32) for name, size in observation_sizes(EnvConfig()).items()}
    made["step_time"][:] = (0.0, 0.05, 0.25)
    made["goodput"][:] = 0.5  # twice plain decoding
    for name, value in parts.items():
        made[name][:] = value
    return made


def info(in_force: Action, *, goodput: float = 1.5, tokens: int = 32, **parts: Any) -> dict[str, Any]:
    """An interval of chat under an action at so many times plain decoding's goodput (10 ms a token)."""
    base: dict[str, Any] = {
        "kind": "chat",
        "num_tokens": tokens,
        "decode_tokens": tokens,
        "plain_s": 0.01 * tokens,
        "decode_s": 0.01 * tokens / goodput,
        "agreement": {},
        "action_in_force": in_force,
    }
    for key in ("proposed", "accepted", "room", "rollbacks"):
        base[key] = np.zeros(3)
    base["step_s"] = np.zeros(4)
    return {**base, **parts}


def play(policy: Policy, played: Scenario, seed: int = 0, steps: int | None = None) -> tuple[float, PipelineSimEnv]:
    """Goodput relative to plain decoding over an episode, and the environment at its end."""
    env = PipelineSimEnv(played, EnvConfig(max_steps=steps or 100_000))
    seen, facts = env.reset(seed=seed)
    policy.reset(Situation(env.config, env.codec, env.world.scenario.pipeline), seed)
    plain_s = decode_s = 0.0
    done = False
    while not done:
        seen, _, terminated, truncated, facts = env.step(policy.act(seen, facts))
        plain_s, decode_s = plain_s + facts["plain_s"], decode_s + facts["decode_s"]
        done = terminated or truncated
    policy.close()
    return plain_s / decode_s, env


class Scripted(Policy):
    """Chooses what it is told, in order, and then the last for ever; an exception in the list is raised."""

    name = "scripted"

    def __init__(self, *script: Any, gain: float | None = None) -> None:
        self._script, self._gain = list(script), gain

    def reset(self, situation: Situation, seed: int = 0) -> None:
        self.resets = getattr(self, "resets", 0) + 1

    def act(self, observation: Observation, info: Info) -> Action:
        wanted = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if isinstance(wanted, Exception):
            raise wanted
        chosen: Action = wanted
        return chosen

    def explain(self) -> Reason:
        return Reason("as the script says", self._gain)
