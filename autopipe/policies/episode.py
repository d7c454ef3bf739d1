"""One simulated episode under a policy, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopipe.envs.config import EnvConfig
from autopipe.envs.pipeline_sim import PipelineSimEnv
from autopipe.envs.randomise import Randomisation, randomise
from autopipe.envs.scenario import PipelineModel, Scenario
from autopipe.policies.base import Policy, Situation

PROFILE_ERROR = Randomisation(latency=0.05, slope=0.05, agreement=0.3, contention=0.1)
"""How far the profile that policies are given is from the truth: it was measured on other prompts, another day."""
MAX_STEPS = 100_000

PolicyMaker = Callable[[PipelineSimEnv], Policy]
"""Policies are made for an environment, because the oracle looks into it."""


@dataclass(slots=True)
class EpisodeResult:
    """One episode.

    Attributes:
        plain_s, decode_s, tokens: by interval: seconds of plain decoding, seconds measured, tokens decoded.
        energy_j: of the whole; None where the scenario has no power figures.
        switches, retunes: changes of chain or adapter, and of other settings.
        decision_ms: median milliseconds of a decision.
        safety: what the safety layer did, `SafetyStats.to_dict`.
    """

    plain_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    energy_j: float | None = None
    switches: int = 0
    retunes: int = 0
    decision_ms: float = 0.0
    safety: dict[str, Any] = field(default_factory=dict)

    @property
    def relative_goodput(self) -> float:
        """Goodput relative to plain decoding, of the whole episode."""
        total_s = sum(self.decode_s)
        return sum(self.plain_s) / total_s if total_s > 0 else 1.0


def run_episode(
    make: PolicyMaker,
    scenario: Scenario,
    seed: int,
    *,
    config: EnvConfig | None = None,
    randomisation: Randomisation | None = None,
    profile_error: Randomisation = PROFILE_ERROR,
) -> EpisodeResult:
    """Run a scenario to its end. A function of its arguments, but for `decision_ms`.

    Args:
        profile_error: how far the profile that the policy is given is from the truth.
    """
    from time import perf_counter

    env = PipelineSimEnv(scenario, (config or EnvConfig()).replace(max_steps=MAX_STEPS), randomisation)
    observation, info = env.reset(seed=seed)
    policy = make(env)
    profile = profile_of(env.world.scenario.pipeline, seed, profile_error)
    result, times_ms = EpisodeResult(), list[float]()
    try:
        policy.reset(Situation(env.config, env.codec, profile), seed)
        done = False
        while not done:
            started_s = perf_counter()
            action = policy.act(observation, info)
            times_ms.append(1e3 * (perf_counter() - started_s))
            observation, _, terminated, truncated, info = env.step(action)
            done = terminated or truncated
            result.plain_s.append(info["plain_s"])
            result.decode_s.append(info["decode_s"])
            result.tokens.append(info["decode_tokens"])
            result.switches += info["switched"]
            result.retunes += info["retuned"]
            if "energy_j" in info:
                result.energy_j = (result.energy_j or 0.0) + info["energy_j"]
        stats = getattr(policy, "stats", None)
        result.safety = stats.to_dict() if stats is not None else {}
    finally:
        policy.close()
    result.decision_ms = float(np.median(times_ms))
    return result


def profile_of(pipeline: PipelineModel, seed: int, error: Randomisation = PROFILE_ERROR) -> PipelineModel:
    """What profiling would have said of a pipeline: near the truth, not the truth."""
    bare = Scenario.model_construct(name="profile", description="", pipeline=pipeline, phases=(), cycles=1, events=())
    return randomise(bare, error, np.random.default_rng([seed, 3])).pipeline
