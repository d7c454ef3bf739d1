"""What all phases of one call of `tune` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopipe.core.plan import Plan
from autopipe.profile import ProfilePrompt
from autopipe.tune.budget import Budget
from autopipe.tune.cost import Cost, cost_of
from autopipe.tune.objective import Goal
from autopipe.tune.options import TuneOptions
from autopipe.tune.predict import PowerModel
from autopipe.tune.search import Callback

Progress = Callable[[str, str, float], None]
"""Told the phase, what is done in it, and the share of the phase that is done, 0 to 1."""


@dataclass(slots=True)
class Context:
    """One call of `tune`.

    Attributes:
        plain: plain decoding. prompts: the workload. power: None: energy is not predicted.
        notes: what did not go as planned, in words; phases add to it.
    """

    options: TuneOptions
    budget: Budget
    plain: Plan
    prompts: Sequence[ProfilePrompt]
    power: PowerModel | None
    goals: tuple[Goal, ...]
    callbacks: Sequence[Callback]
    progress: Progress
    notes: list[str] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)

    @property
    def cost(self) -> Cost:
        """What of live runs is to be small."""
        return cost_of(self.options.objective)
