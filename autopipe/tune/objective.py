"""What is to be best: the values a trial is given, and how one plan is told to be better than another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from autopipe.core.errors import ConfigError
from autopipe.tune.predict import Prediction

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


class Objective(StrEnum):
    THROUGHPUT = "throughput"
    """Most output tokens per second over the workload."""
    LATENCY = "latency"
    """Fewest milliseconds per token of the slowest tenth of requests."""
    ENERGY = "energy"
    """Fewest joules per token."""
    PARETO = "pareto"
    """Goodput, time to first token, memory and (where it can be measured) energy, all at once."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One value of a trial. `direction` as Optuna spells it."""

    name: str
    direction: Literal["minimize", "maximize"]


_GOODPUT = Goal("tokens_per_s", "maximize")
_ENERGY = Goal("j_per_token", "minimize")


def goals(objective: Objective, *, has_energy: bool) -> tuple[Goal, ...]:
    """The values of an objective, the most important first.

    Raises:
        ConfigError: energy is to be minimized, and this machine does not tell it.
    """
    if objective is Objective.THROUGHPUT:
        return (_GOODPUT,)
    if objective is Objective.LATENCY:
        return (Goal("slow_ms_per_token", "minimize"),)
    if objective is Objective.ENERGY:
        if not has_energy:
            allowed = "throughput, latency or pareto: this machine has no energy counter (see `autopipe doctor`)"
            raise ConfigError("--objective", objective.value, allowed)
        return (_ENERGY,)
    several = (_GOODPUT, Goal("ttft_s", "minimize"), Goal("total_memory_bytes", "minimize"))
    return (*several, _ENERGY) if has_energy else several


def values(goals: Sequence[Goal], found: Prediction) -> list[float]:
    """A trial's values."""
    return [float(getattr(found, goal.name)) for goal in goals]


def cost(goals: Sequence[Goal], found: Prediction) -> float:
    """What is to be small, by the first goal; of two plans the ratio says how many times as good one is."""
    (value,) = values(goals[:1], found)
    return value if goals[0].direction == "minimize" else 1 / value


def better_first(goals: Sequence[Goal], trial: FrozenTrial) -> float:
    """Sort key of finished trials: the best in the first goal comes first."""
    value = float(trial.values[0])
    return -value if goals[0].direction == "maximize" else value
