"""A trained network as a policy. It needs torch alone; what trained it is not needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autopipe.envs.menu import Action
from autopipe.envs.observation import Observation
from autopipe.policies.base import Info, Policy, Reason, Situation, info_mask
from autopipe.policies.features import Features, feature_size
from autopipe.policies.rl_format import SavedPolicy, check_spaces, load_policy

if TYPE_CHECKING:
    import torch

SHIPPED = Path(__file__).parent / "trained"
"""The policy that comes with AutoPipe."""


class RlPolicy(Policy):
    """The most likely allowed action of a trained network.

    Args:
        folder: of the policy; None: the one that ships with AutoPipe.
        keep_margin: the plan in force stays unless the network likes another chain this much more (in logits).

    Raises:
        ConfigError: the folder is not a policy, or one for other spaces (in `reset`).
    """

    name = "rl"

    def __init__(self, folder: Path | None = None, *, keep_margin: float = 0.5) -> None:
        self._saved: SavedPolicy = load_policy(SHIPPED if folder is None else folder)
        self._margin = keep_margin
        self._network = network_of(self._saved)

    def reset(self, situation: Situation, seed: int = 0) -> None:
        config, codec = situation.config, situation.codec
        check_spaces(self._saved.header, config.spaces, feature_size(config))
        self._codec = codec
        self._features = Features(situation)
        self._starts = np.concatenate([[0], np.cumsum(codec.sizes)])
        self._action = codec.off()
        self._confidence = 0.0

    def act(self, observation: Observation, info: Info) -> Action:
        import torch

        vector = self._features.vector(observation, info)
        with torch.inference_mode():
            logits = self._network(torch.from_numpy(vector)[None])[0].numpy().astype(np.float64)
        mask = info_mask(info, self._codec)
        logits = np.where(mask, logits, -np.inf)
        chains = logits[: self._starts[1]].copy()
        chains[self._action[0]] += self._margin
        action = np.array(
            [int(np.argmax(logits[start:end])) for start, end in zip(self._starts[:-1], self._starts[1:], strict=True)]
        )
        action[0] = int(np.argmax(chains))
        share = np.exp(chains - chains.max())
        self._confidence = float(share[action[0]] / share.sum())
        self._action = self._codec.canonical(action)
        return self._action

    def explain(self) -> Reason:
        return Reason(f"the network is {self._confidence:.0%} sure of {self._codec.describe(self._action)}")


def network_of(saved: SavedPolicy) -> torch.nn.Module:
    """The network: features float32 [n, features] to logits [n, sum(nvec)], normalisation included."""
    import torch

    class Normalise(torch.nn.Module):
        mean: torch.Tensor
        std: torch.Tensor

        def __init__(self, mean: torch.Tensor, std: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("mean", mean)
            self.register_buffer("std", std)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return (features - self.mean) / self.std

    header, tensors = saved.header, saved.tensors
    modules: list[torch.nn.Module] = [Normalise(tensors["mean"], tensors["std"])] if header.normalised else []
    for index, (inputs, outputs) in enumerate(zip(header.layers[:-1], header.layers[1:], strict=True)):
        layer = torch.nn.Linear(inputs, outputs)
        layer.weight = torch.nn.Parameter(tensors[f"layers.{index}.weight"], requires_grad=False)
        layer.bias = torch.nn.Parameter(tensors[f"layers.{index}.bias"], requires_grad=False)
        modules.append(layer)
        if index < len(header.layers) - 2:
            modules.append(torch.nn.Tanh() if header.activation == "tanh" else torch.nn.ReLU())
    return torch.nn.Sequential(*modules).eval()
