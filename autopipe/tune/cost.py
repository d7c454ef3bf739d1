"""What of live runs is to be small, by objective, and when a difference in it is more than noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopipe.tune.live import Run
from autopipe.tune.objective import Objective
from autopipe.tune.predict import SLOW_SHARE

Floats = npt.NDArray[np.float64]

_RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Cost:
    """A cost of runs.

    Attributes:
        of: one run's.
        total: of the costs of several runs, [..., runs], what counts, [...].
        by_run: every run counts in the total. False: a few do, so run by run nothing can be said of it.
        words: of `1.3 times ...`, how a lower cost than plain decoding's is told.
    """

    of: Callable[[Run], float]
    total: Callable[[Floats], Floats]
    by_run: bool
    words: str

    def ratio(self, runs: Sequence[Run], plain_runs: Sequence[Run]) -> float:
        """Cost of runs over that of plain decoding of the same prompts; NaN where there are none."""
        plain = float(self.total(self._each(plain_runs))) if plain_runs else 0.0
        return float(self.total(self._each(runs))) / plain if plain > 0 else math.nan

    def p_better(self, runs: Sequence[Run], plain_runs: Sequence[Run]) -> float:
        """Chance of such a gain over plain decoding if there were none; 1 with too few runs.

        Where every run counts, by a one-sided Wilcoxon signed-rank test over pairs of runs; else the share of bootstrap
        resamples of the pairs in which nothing is gained (Efron & Tibshirani, Introduction to the Bootstrap, ch. 15).
        """
        if len(runs) < 2:
            return 1.0
        costs, plain_costs = self._each(runs), self._each(plain_runs)
        if self.by_run:
            from scipy.stats import wilcoxon

            return float(wilcoxon(np.log(costs / plain_costs), alternative="less", zero_method="zsplit").pvalue)
        picks = np.random.default_rng(0).integers(len(runs), size=(_RESAMPLES, len(runs)))
        return float(np.mean(self.total(costs[picks]) >= self.total(plain_costs[picks])))

    def _each(self, runs: Sequence[Run]) -> Floats:
        return np.array([self.of(run) for run in runs])


def slowest(values: Floats) -> Floats:
    """The 90th percentile of the last axis: of requests, where the slowest tenth begins."""
    return np.asarray(np.quantile(values, SLOW_SHARE, axis=-1))


def _sum(values: Floats) -> Floats:
    return np.asarray(values.sum(axis=-1))


def _joules(run: Run) -> float:
    return math.nan if run.energy_j is None else run.energy_j


SECONDS = Cost(lambda run: run.seconds, _sum, True, "as fast as plain decoding")
TAIL = Cost(lambda run: run.ms_per_token, slowest, False, "as fast as plain decoding on the slowest tenth of requests")
ENERGY = Cost(_joules, _sum, True, "as sparing of energy as plain decoding")


def cost_of(objective: Objective) -> Cost:
    """What the live check holds plans to: what the search looked for; of several goals the first, speed."""
    return {Objective.LATENCY: TAIL, Objective.ENERGY: ENERGY}.get(objective, SECONDS)
