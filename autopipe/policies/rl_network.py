"""The part of the training network that stable-baselines3 does not have: a fixed normalisation."""

from __future__ import annotations

import gymnasium
import torch
from numpy.typing import NDArray
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor


class FixedNormaliser(BaseFeaturesExtractor):
    """(features - mean) / std, with statistics that training does not change.

    Args:
        mean, std: float [features].
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, observation_space: gymnasium.Space[object], mean: NDArray[object], std: NDArray[object]) -> None:  # type: ignore[type-var]
        super().__init__(observation_space, len(mean))
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return (observations - self.mean) / self.std

    def set_statistics(self, mean: NDArray[object], std: NDArray[object]) -> None:  # type: ignore[type-var]
        """Fix other statistics."""
        self.mean.copy_(torch.tensor(mean))
        self.std.copy_(torch.tensor(std))
