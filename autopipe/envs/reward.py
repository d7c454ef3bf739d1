"""The reward: goodput relative to plain decoding, minus energy, broken latency targets and switching."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.envs.config import LatencyTargets, RewardWeights
from autopipe.envs.interval import Interval

MAX_RELATIVE = 10.0
"""Goodput and energy relative to plain decoding count up to this: one freak measurement must not rule a policy."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the action changed: another chain or adapter, other settings, or nothing because it was masked."""

    switched: bool = False
    retuned: bool = False
    rejected: bool = False


def reward_terms(
    interval: Interval, decision: Decision, weights: RewardWeights, targets: LatencyTargets
) -> dict[str, float]:
    """The terms of the reward by name, signed, so that their sum is the reward; see `RewardWeights`.

    An interval that holds nothing but first tokens counts as plain decoding: no plan could change it.
    """
    goodput, energy = interval.relative_goodput, 0.0
    if interval.energy_j is not None and interval.plain_energy_j:
        energy = min(interval.energy_j / interval.plain_energy_j, MAX_RELATIVE)
    return {
        "goodput": weights.goodput * (1.0 if goodput is None else min(goodput, MAX_RELATIVE)),
        "energy": 0.0 - weights.energy * energy,
        "latency": 0.0 - weights.latency * missed_targets(interval, targets),
        "switch": 0.0 - weights.switch * decision.switched - weights.retune * decision.retuned,
        "rejected": 0.0 - weights.rejected * decision.rejected,
    }


def missed_targets(interval: Interval, targets: LatencyTargets) -> float:
    """Share of the latency targets missed in an interval, 0 to 1: each request that began, and the tokens' pace."""
    missed: list[bool] = []
    if targets.ttft_s is not None:
        missed += [ttft_s > targets.ttft_s for ttft_s in interval.ttfts_s]
    if targets.ms_per_token is not None and interval.ms_per_token is not None:
        missed.append(interval.ms_per_token > targets.ms_per_token)
    return sum(missed) / len(missed) if missed else 0.0
