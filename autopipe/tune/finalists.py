"""Which plans of the search are worth measuring, and on how many prompts: as many as time allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.core.plan import Mode
from autopipe.tune.objective import Goal, cost
from autopipe.tune.race import FINAL, FIRST_PROMPTS, LEAST_STEPS
from autopipe.tune.search import Found
from autopipe.tune.space import structure

_SIZES = ((12, 32), (10, 24), (8, 24), (8, 16), (6, 16), (6, 12), (4, 12), (4, 8), (3, 8), (3, 6), (2, 6), (1, 6))
"""Plans and prompts of a race, in order of preference."""
_ALIKE = 3
"""At most so many plans with the same chain and mode, while there are others: the simulator may be wrong about one."""
_CLOSE = 0.7
"""Plans predicted not even this share as good as the best one are not worth measuring."""


@dataclass(frozen=True, slots=True)
class RaceSize:
    plans: int
    prompts: int


def race_size(time_s: float, run_s: float, num_prompts: int) -> RaceSize:
    """The largest race that fits.

    Args:
        time_s: for all of it. run_s: of plain decoding of one prompt. num_prompts: that there are.
    """
    for plans, prompts in _SIZES:
        size = RaceSize(plans, min(prompts, num_prompts))
        if num_runs(size) * run_s <= time_s:
            return size
    return RaceSize(1, min(4, num_prompts))


def num_runs(size: RaceSize) -> int:
    """Runs of a race, those of plain decoding included."""
    count, plans, total = FIRST_PROMPTS, size.plans, 0
    while plans > FINAL and count < size.prompts:
        total += count * (plans + 1)
        plans, count = max(FINAL, -(-plans // 2)), 2 * count
    return total + 2 * min(FINAL, size.plans) * max(size.prompts, LEAST_STEPS)


def choose(ranked: Sequence[Found], count: int, goals: Sequence[Goal]) -> list[Found]:
    """The best plans, of different kinds. Plain decoding is not among them: it is measured beside each."""
    drafting = [found for found in ranked if found.plan.mode is not Mode.PLAIN]
    if not drafting:
        return []
    best = min(cost(goals, found.prediction) for found in drafting)
    worth = [found for found in drafting if cost(goals, found.prediction) <= best / _CLOSE]
    chosen: list[Found] = []
    for most in (_ALIKE, len(worth)):
        for found in worth:
            alike = sum(structure(other.plan) == structure(found.plan) for other in chosen)
            if len(chosen) < count and found not in chosen and alike < most:
                chosen.append(found)
    return sorted(chosen, key=list(ranked).index)
