"""What the RL policy sees: the observation as one vector, what is known of every drafter's agreement, and what the
closed formulas make of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.config import EnvConfig
from autopipe.envs.menu import action_sizes
from autopipe.envs.observation import Observation, observation_sizes
from autopipe.policies.base import Info, Situation, info_mask
from autopipe.policies.beliefs import Beliefs
from autopipe.policies.candidates import candidates
from autopipe.policies.live_profile import assumed_profile
from autopipe.policies.predict import Machine, Predictor

Vector = NDArray[np.float32]
_HALF_LIVES = (2.0, 12.0)
"""In control intervals."""


def feature_size(config: EnvConfig) -> int:
    """Length of the feature vector."""
    slots = config.spaces.drafter_slots
    seen = int(sum(observation_sizes(config).values())) + 3 * slots + 3
    return seen + (1 << slots) + int(sum(action_sizes(config.spaces))) + slots + 2


class Features:
    """Turns observations and infos of one episode into vectors.

    Behind the observation (parts in the order of their names) come
    - by slot: agreement on the kind of text under way, fast and slow average, where the environment scores the drafter
      whether it drafts or not, and whether it does;
    - the last interval's goodput, how long the kind of text has been the same, whether anything was decoded;
    - by chain: the goodput that the formulas (`Predictor`, fed by `Beliefs`) expect of its best plan, 0 where the mask
      forbids it; the best plan of all, one-hot; by slot and for the target, how much slower than profiled it is
      believed to be; the goodput expected of the plan in force.
    Goodputs are relative to plain decoding, on a log scale from a quarter to four times.

    Args:
        situation: with a profile, or the formulas go by guessed times.
        scored: slots whose `info["agreement"]` is used; None: all. Training hides some, as live engines do.
    """

    def __init__(self, situation: Situation, scored: NDArray[np.bool_] | None = None) -> None:
        config, codec = situation.config, situation.codec
        slots = config.spaces.drafter_slots
        self._codec = codec
        self._order = sorted(observation_sizes(config))
        self._keep = 0.5 ** (1 / np.array(_HALF_LIVES))
        self._counts: dict[str, NDArray[np.float64]] = {}  # by kind: [right or judged, fast or slow, slots]
        self._no_counts = np.zeros((2, 2, slots))
        self._slot_of = {name: slot for slot, name in enumerate(codec.slot_names())}
        self._scored = np.ones(slots, dtype=np.bool_) if scored is None else scored
        self._kind = ""
        self._since_change = 0
        machine = Machine.of(situation.profile or assumed_profile(codec), codec)
        self._plans = candidates(codec)
        self._predictor = Predictor(machine, self._plans)
        self._beliefs = Beliefs(situation, machine)

    def vector(self, observation: Observation, info: Info) -> Vector:
        """Features, float32 [feature_size], all in [0, 1]."""
        kind = str(info.get("kind", ""))
        scored = {
            name: share
            for name, share in (info.get("agreement") or {}).items()
            if name in self._slot_of and self._scored[self._slot_of[name]]
        }
        self._count(float(info.get("decode_tokens", 0)), scored, kind)
        right, judged = self._counts.get(kind, self._no_counts)
        known = judged[0] > 0
        shares = np.where(known, right / np.maximum(judged, 1e-9), 0.0)
        self._since_change = 0 if kind != self._kind else self._since_change + 1
        self._kind = kind
        parts: list[Any] = [observation[name] for name in self._order]
        parts += [shares[0], shares[1], known.astype(np.float32)]
        parts.append([_measured(info), min(self._since_change / 8, 1.0), float(info.get("decode_tokens", 0) > 0)])
        parts += self._expected({**info, "agreement": scored})
        vector: Vector = np.concatenate(parts).astype(np.float32)
        return vector

    def _count(self, tokens: float, scored: dict[str, float], kind: str) -> None:
        for name, share in scored.items() if tokens > 0 else ():
            counts = self._counts.setdefault(kind, self._no_counts.copy())
            slot = self._slot_of[name]
            counts[:, :, slot] = self._keep * counts[:, :, slot] + np.array([[share * tokens], [tokens]])

    def _expected(self, info: Info) -> list[Any]:
        """What the formulas make of it."""
        in_force = info.get("action_in_force", self._codec.off())
        self._beliefs.update(info, in_force)
        seconds = self._predictor.seconds_per_token(self._beliefs.agreement(), self._beliefs.slow_down)
        plain_s = seconds[0]
        current = self._plans.index(in_force)
        expected = 0.5 if current is None else float(_scaled(plain_s / seconds[current]))
        seconds[~self._plans.allowed(info_mask(info, self._codec))] = np.inf
        by_chain = np.full(self._codec.sizes[0], np.inf)
        np.minimum.at(by_chain, self._plans.actions[:, 0], seconds)
        best = self._codec.one_hot(self._plans.actions[int(np.argmin(seconds))])
        chains = np.where(np.isfinite(by_chain), _scaled(plain_s / by_chain), 0.0)
        return [chains, best, _scaled(1 / self._beliefs.slow_down), [expected]]


def _measured(info: Info) -> float:
    """Goodput of the last interval; 0.5 where it is not known."""
    plain_s, decode_s = float(info.get("plain_s", 0.0)), float(info.get("decode_s", 0.0))
    return float(_scaled(np.array(plain_s / decode_s))) if plain_s > 0 and decode_s > 0 else 0.5


def _scaled(ratio: Any) -> Any:
    """Log scale from a quarter (0) to four times (1); 0.5: equal."""
    return np.clip(0.5 + np.log(np.maximum(ratio, 1e-6)) / np.log(16.0), 0.0, 1.0)
