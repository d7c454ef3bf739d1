"""The simulator as RL training sees it: features instead of observations, and a machine that differs every episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from autopipe.envs.config import EnvConfig
from autopipe.envs.menu import OFF, Action, Mask
from autopipe.envs.pipeline_sim import PipelineSimEnv
from autopipe.envs.randomise import Randomisation
from autopipe.envs.scenario import Scenario
from autopipe.policies.base import Situation
from autopipe.policies.candidates import candidates
from autopipe.policies.episode import profile_of
from autopipe.policies.features import Features, Vector, feature_size
from autopipe.policies.predict import Machine, Predictor
from autopipe.policies.random_scenarios import random_scenario
from autopipe.policies.truth import true_state

_HIDDEN_SHARE = 0.35
"""Share of episodes in which drafters are not scored unless they draft, as it is in engines that do not score them."""


class TrainingEnv(gymnasium.Env[Vector, NDArray[np.int64]]):
    """`PipelineSimEnv` with `Features`, `action_masks()` and a teacher.

    Args:
        scenarios: of which every episode draws one.
        randomisation: of every episode.
        random_share: share of episodes whose scenario is drawn by `random_scenario` instead.
    """

    def __init__(
        self,
        scenarios: Sequence[str | Scenario],
        randomisation: Randomisation,
        config: EnvConfig | None = None,
        random_share: float = 0.5,
    ) -> None:
        self._random_share = random_share
        self._env = PipelineSimEnv(list(scenarios), config, randomisation)
        size = feature_size(self._env.config)
        self.observation_space = spaces.Box(0.0, 1.0, (size,), np.float32)
        self.action_space = self._env.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Vector, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = {"scenario": random_scenario(self.np_random)} if self.np_random.random() < self._random_share else {}
        observation, info = self._env.reset(seed=int(self.np_random.integers(2**31)), options=drawn)
        codec = self._env.codec
        hidden = self.np_random.random() < _HIDDEN_SHARE
        scored = np.zeros(codec.num_slots, dtype=np.bool_) if hidden else None
        if scored is not None:
            scored[0] = self.np_random.random() < 0.5  # an n-gram drafter can be scored anywhere
        profile = profile_of(self._env.world.scenario.pipeline, int(self.np_random.integers(2**31)))
        self._features = Features(Situation(self._env.config, codec, profile), scored)
        self._teacher: Predictor | None = None
        return self._features.vector(observation, info), info

    def step(self, action: NDArray[np.int64]) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._env.step(action)
        return self._features.vector(observation, info), reward, terminated, truncated, info

    def action_masks(self) -> Mask:
        """See `PipelineEnv.action_masks`."""
        return self._env.action_masks()

    def teach(self) -> Action:
        """The best action by the closed formulas with the true agreement and the true times, the kind of text to come
        included: what imitation learning imitates. The plan in force stays while no other is 1% better."""
        env, codec = self._env, self._env.codec
        if self._teacher is None:
            self._teacher = Predictor(Machine.of(env.world.scenario.pipeline, codec), candidates(codec))
        plans = self._teacher.plans
        seconds = self._teacher.seconds_per_token(*true_state(env.world, codec), env.world.conditions.contention)
        seconds[~plans.allowed(self.action_masks())] = np.inf
        current = plans.index(env.world.action)
        if current is not None and env.world.action[0] != OFF:
            seconds[current] *= 0.99
        best: Action = plans.actions[int(np.argmin(seconds))].copy()
        return best
