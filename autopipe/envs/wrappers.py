"""The wrappers people expect, put together from Gymnasium's own."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import (
    FlattenObservation,
    FrameStackObservation,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
)
from numpy.typing import NDArray

from autopipe.core.errors import ConfigError
from autopipe.envs.menu import Mask

__all__ = [
    "FlattenObservation",
    "FrameStackObservation",
    "KeepMasks",
    "NormalizeObservation",
    "NormalizeReward",
    "RecordEpisodeStatistics",
    "flatten",
    "normalise",
    "stack_history",
]

Env = gymnasium.Env[Any, Any]


class KeepMasks(gymnasium.Wrapper[Any, Any, Any, Any], gymnasium.utils.RecordConstructorArgs):
    """Hands `action_masks()` through, which Gymnasium's wrappers hide; sb3-contrib looks for it on the outermost."""

    def __init__(self, env: Env) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)

    def action_masks(self) -> Mask:
        """See `PipelineEnv.action_masks`."""
        mask: Mask = self.env.get_wrapper_attr("action_masks")()
        return mask


class _StackedVector(gymnasium.ObservationWrapper[Any, Any, Any], gymnasium.utils.RecordConstructorArgs):
    """A stack of vectors [n, m] as one vector [n * m], the oldest first: SB3 takes two axes for a picture."""

    def __init__(self, env: Env) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        stacked = env.observation_space
        if not isinstance(stacked, spaces.Box):
            raise ConfigError("observation_space", type(stacked).__name__, "a stack of vectors (Box)")
        self.observation_space = spaces.Box(stacked.low.reshape(-1), stacked.high.reshape(-1), dtype=np.float32)

    def observation(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        return observation.reshape(-1)


def flatten(env: Env) -> Env:
    """Observations as one vector, float32 [n], in the order of the observation space's keys (sorted)."""
    return KeepMasks(FlattenObservation(env))


def stack_history(env: Env, num_steps: int) -> Env:
    """Observations of the last `num_steps` control steps in one vector, float32 [num_steps * n], the oldest first.

    Raises:
        ConfigError: `num_steps` below 1.
    """
    if num_steps < 1:
        raise ConfigError("num_steps", num_steps, "at least 1")
    if num_steps == 1:
        return flatten(env)
    return KeepMasks(_StackedVector(FrameStackObservation(FlattenObservation(env), num_steps)))


def normalise(env: Env, *, observations: bool = True, rewards: bool = True, gamma: float = 0.99) -> Env:
    """Running normalisation, of a flattened environment's observations and of returns.

    Args:
        gamma: discount of the returns whose spread rewards are divided by.

    Raises:
        ConfigError: observations that are not a vector.
    """
    if observations:
        if not isinstance(env.observation_space, spaces.Box):
            raise ConfigError("observation_space", type(env.observation_space).__name__, "a vector: flatten first")
        env = NormalizeObservation(env)
    if rewards:
        env = NormalizeReward(env, gamma=gamma)
    return KeepMasks(env)
