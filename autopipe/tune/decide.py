"""Which plan it is to be, by what was measured. Nothing but a clear gain over plain decoding is taken for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.profile import ProfilePrompt
from autopipe.tune.cost import SECONDS, Cost, slowest
from autopipe.tune.limits import Limits, device_memory
from autopipe.tune.race import Arm

P_BETTER = 0.05
"""A plan counts as better than plain decoding where the test says so at this level (see `Cost.p_better`)."""
KIND_NOISE = 0.03
"""A plan may be slower than plain decoding by this much on one kind of prompt: that much two runs differ."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What won, and why.

    Attributes:
        winner: None: plain decoding.
        reason: in words.
        best: the best arm that might have been chosen, the winner or what plain decoding won against; None: none might.
    """

    winner: Arm | None
    reason: str
    best: Arm | None = None


def decide(arms: Sequence[Arm], prompts: Sequence[ProfilePrompt], limits: Limits, cost: Cost) -> Decision:
    """Choose among measured arms and plain decoding; notes in each arm's `failed` why it could not be chosen."""
    fit = [arm for arm in arms if arm.failed is None and arm.runs]
    for arm in fit:
        arm.failed = _unfit(arm, prompts, limits)
    fit = [arm for arm in fit if arm.failed is None]
    measured = [arm for arm in fit if arm.given_up is None and not arm.unfinished]
    if not measured:  # time was up: the arms that were measured longest
        longest = max((len(arm.runs) for arm in fit), default=0)
        measured = [arm for arm in fit if len(arm.runs) == longest]
    if not measured:
        return Decision(None, "no plan could be measured; plain decoding is always safe")
    best = min(measured, key=lambda arm: arm.ratio(cost))
    p_value = p_better(best, cost)
    gain = 1 / best.ratio(cost)
    if gain <= 1 or p_value >= P_BETTER:
        return Decision(
            None,
            f"nothing helps here: the best candidate, {best.name}, measured {gain:.2f} times {cost.words} "
            f"(p = {p_value:.2f}), which is no gain beyond noise",
            best,
        )
    return Decision(best, f"the best of {len(arms)} measured candidates, {gain:.2f} times {cost.words}", best)


def p_better(arm: Arm, cost: Cost) -> float:
    """Chance of such a gain over plain decoding if there were none; 1 with too few measurements."""
    return cost.p_better(list(arm.runs.values()), [arm.plain_runs[place] for place in arm.runs])


def by_kind(arm: Arm, prompts: Sequence[ProfilePrompt]) -> dict[str, float]:
    """How many times as fast as plain decoding, by kind of prompt."""
    steps: dict[str, list[int]] = {}
    for step in arm.runs:
        steps.setdefault(prompts[step % len(prompts)].kind, []).append(step)
    return {kind: 1 / arm.ratio(SECONDS, places) for kind, places in steps.items()}


def _unfit(arm: Arm, prompts: Sequence[ProfilePrompt], limits: Limits) -> str | None:
    """Why a plan must not be chosen however good it is; None if it may be."""
    for kind, gain in by_kind(arm, prompts).items():
        if gain < 1 - KIND_NOISE:
            return f"slower than plain decoding on {kind} prompts ({gain:.2f} times its speed)"
    for name, limit, value in (
        ("ms per token", limits.ms_per_token, ms_per_token(arm)),
        ("s to the first token", limits.ttft_s, ttft_s(arm)),
        ("J per token", limits.j_per_token, j_per_token(arm)),
        ("bytes of memory", limits.memory_limit("cpu", device_memory(set())), memory_bytes(arm)),
    ):
        if limit is not None and value is not None and value > limit:
            return f"{value:.4g} {name} measured, {limit:.4g} allowed"
    return None


def ms_per_token(arm: Arm, *, plain: bool = False) -> float | None:
    """Measured milliseconds per token over all runs; of plain decoding beside it."""
    runs = list((arm.plain_runs if plain else arm.runs).values())
    tokens = sum(len(run.token_ids) for run in runs)
    return 1e3 * sum(run.seconds for run in runs) / tokens if tokens else None


def slow_ms_per_token(arm: Arm, *, plain: bool = False) -> float | None:
    """Measured milliseconds per token of the run at the 90th percentile; of plain decoding beside it."""
    runs = (arm.plain_runs if plain else arm.runs).values()
    return float(slowest(np.array([run.ms_per_token for run in runs]))) if runs else None


def ttft_s(arm: Arm) -> float | None:
    """Mean measured seconds to the first token."""
    known = [run.ttft_s for run in arm.runs.values() if run.ttft_s is not None]
    return sum(known) / len(known) if known else None


def j_per_token(arm: Arm) -> float | None:
    """Measured joules per token, over the runs for which the machine told it."""
    known = [(run.energy_j, len(run.token_ids)) for run in arm.runs.values() if run.energy_j is not None]
    tokens = sum(count for _, count in known)
    return sum(energy for energy, _ in known) / tokens if tokens else None


def memory_bytes(arm: Arm) -> int | None:
    """The most main memory that its stages held after a run."""
    return max((run.memory_bytes for run in arm.runs.values() if run.memory_bytes is not None), default=None)
