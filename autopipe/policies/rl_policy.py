"""A trained network as a policy: what trained it is not needed, and a decision is a few small products."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.config import EnvConfig
from autopipe.envs.menu import Action
from autopipe.envs.observation import Observation, observation_sizes
from autopipe.policies.base import Info, Policy, Reason, Situation, info_mask
from autopipe.policies.features import Features, feature_size
from autopipe.policies.rl_format import SavedPolicy, check_spaces, load_policy

SHIPPED = Path(__file__).parent / "trained"
"""The policy that comes with AutoPipe."""
_HARDLY_EVER = 0.02
"""Share of the training in which a figure was missing."""


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
        self._network = Network(self._saved)

    def reset(self, situation: Situation, seed: int = 0) -> None:
        config, codec = situation.config, situation.codec
        check_spaces(self._saved.header, config.spaces, feature_size(config))
        self._codec = codec
        self._features = Features(situation)
        self._network.expect(optional_figures(config))
        self._starts = np.concatenate([[0], np.cumsum(codec.sizes)])
        self._action = codec.off()
        self._confidence = 0.0

    def act(self, observation: Observation, info: Info) -> Action:
        logits = self._network(self._features.vector(observation, info)).astype(np.float64)
        logits[~info_mask(info, self._codec)] = -np.inf
        chains = logits[: self._starts[1]].copy()
        chains[self._action[0]] += self._margin
        action = np.array([logits[start:end].argmax() for start, end in pairwise(self._starts)])
        action[0] = int(np.argmax(chains))
        share = np.exp(chains - chains.max())
        self._confidence = float(share[action[0]] / share.sum())
        self._action = self._codec.canonical(action)
        return self._action

    def explain(self) -> Reason:
        return Reason(f"the network is {self._confidence:.0%} sure of {self._codec.describe(self._action)}")


OptionalFigures = tuple[slice, slice]
"""Places of figures among the features, and of the flags that say which of them are missing."""


def optional_figures(config: EnvConfig) -> list[OptionalFigures]:
    """The figures of an observation that may be missing."""
    sizes, places, at = observation_sizes(config), dict[str, slice](), 0
    for name in sorted(sizes):  # as in `Features`
        places[name] = slice(at, at + sizes[name])
        at += sizes[name]
    return [(places[name], places[f"{name}_missing"]) for name in sizes if f"{name}_missing" in sizes]


class Network:
    """Features float32 [features] to logits float32 [sum(nvec)], normalisation included.

    Figures that are missing here, but hardly ever were in training (telemetry, on a machine without a GPU), are taken
    to be what they were on average: their flags alone would be twenty standard deviations from anything it knows.

    In numpy: of layers this small torch spends most of its time on the call.
    """

    def __init__(self, saved: SavedPolicy) -> None:
        arrays = {name: tensor.float().numpy() for name, tensor in saved.tensors.items()}
        header = saved.header
        self._statistics = (arrays["mean"], arrays["std"]) if header.normalised else None
        self._relu = header.activation == "relu"
        indices = range(len(header.layers) - 1)
        self._layers = [(arrays[f"layers.{index}.weight"], arrays[f"layers.{index}.bias"]) for index in indices]
        self._never_missing: list[OptionalFigures] = []

    def expect(self, parts: Sequence[OptionalFigures]) -> None:
        """Learn where among the features figures may be missing."""
        if self._statistics is not None:
            mean = self._statistics[0]
            self._never_missing = [part for part in parts if mean[part[1]].max(initial=0.0) < _HARDLY_EVER]

    def __call__(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        value = features
        if self._statistics is not None:
            mean, std = self._statistics
            value = (value - mean) / std
            for figures, flags in self._never_missing:
                missing = features[flags] > 0.5
                value[figures][missing] = 0.0
                value[flags][missing] = 0.0
        *hidden, (last_weight, last_bias) = self._layers
        for weight, bias in hidden:
            value = weight @ value + bias
            value = np.maximum(value, 0) if self._relu else np.tanh(value)
        logits: NDArray[np.float32] = last_weight @ value + last_bias
        return logits
