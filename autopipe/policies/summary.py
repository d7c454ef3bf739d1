"""From the cells of an evaluation to its table: means and 95% intervals over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.policies.evaluation_cells import OFF, ORACLE, STATIC, Cell

_RESAMPLES = 2000
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95% interval, by bootstrap over seeds."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float] | Floats) -> Estimate:
        array = np.asarray(values, dtype=np.float64)
        draws = np.random.default_rng(0).integers(len(array), size=(_RESAMPLES, len(array)))
        means = array[draws].mean(axis=1)
        return cls(float(array.mean()), float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975)))


@dataclass(frozen=True, slots=True)
class Row:
    """A policy on a scenario.

    Attributes:
        of_oracle, of_plain, of_static: goodput relative to the oracle's, to plain decoding, to the best static plan
            (chosen with hindsight), seed by seed.
        least_of_plain: of the worst seed.
        regret: tokens of plain decoding lost to the oracle in the whole episode.
        regret_curve: the same up to each of 64 shares of the tokens.
        energy_of_plain: joules relative to plain decoding's; None: not known.
        switches, retunes, floor_breaks, errors: per episode. decision_ms: of the median decision.
        plan: the static plan.
    """

    scenario: str
    policy: str
    seeds: int
    of_oracle: Estimate
    of_plain: Estimate
    of_static: Estimate
    least_of_plain: float
    regret: float
    regret_curve: list[float]
    energy_of_plain: float | None
    switches: float
    retunes: float
    floor_breaks: float
    errors: int
    decision_ms: float
    plan: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def make_rows(cells: Sequence[Cell]) -> list[Row]:
    """One row for every scenario and policy, in the order of the cells."""
    groups: dict[tuple[str, str], dict[int, Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.scenario, cell.policy), {})[cell.seed] = cell
    return [_row(scenario, policy, groups) for scenario, policy in groups]


def _row(scenario: str, policy: str, groups: dict[tuple[str, str], dict[int, Cell]]) -> Row:
    mine = groups[scenario, policy]
    others = {name: groups[scenario, name] for name in (ORACLE, STATIC, OFF)}
    seeds = sorted(seed for seed in mine if all(seed in each for each in others.values()))
    cells = [mine[seed] for seed in seeds]
    goodput = np.array([cell.relative_goodput for cell in cells])

    def relative(name: str) -> Estimate:
        return Estimate.of(goodput / np.array([others[name][seed].relative_goodput for seed in seeds]))

    regrets = [_regret(mine[seed], others[ORACLE][seed]) for seed in seeds]
    energies = [_energy(mine[seed], others[OFF][seed]) for seed in seeds]
    known = [value for value in energies if value is not None]
    regret_curve = np.mean(regrets, axis=0)
    return Row(
        scenario=scenario,
        policy=policy,
        seeds=len(seeds),
        of_oracle=relative(ORACLE),
        of_plain=Estimate.of(goodput),
        of_static=relative(STATIC),
        least_of_plain=float(goodput.min()),
        regret=float(regret_curve[-1]),
        regret_curve=[round(float(value), 3) for value in regret_curve],
        energy_of_plain=float(np.mean(known)) if known else None,
        switches=float(np.mean([cell.switches for cell in cells])),
        retunes=float(np.mean([cell.retunes for cell in cells])),
        floor_breaks=float(np.mean([cell.safety.get("floor_breaks", 0) for cell in cells])),
        errors=sum(len(cell.safety.get("errors", ())) for cell in cells),
        decision_ms=float(np.median([cell.decision_ms for cell in cells])),
        plan=cells[0].plan,
    )


def _regret(cell: Cell, oracle: Cell) -> Floats:
    """Time lost to the oracle by share of the tokens, in tokens of plain decoding."""
    plain_token_s = cell.plain_curve_s[-1] / max(cell.tokens, 1)
    lost: Floats = (np.array(cell.curve_s) - np.array(oracle.curve_s)) / plain_token_s
    return lost


def _energy(cell: Cell, off: Cell) -> float | None:
    if cell.energy_j is None or not off.energy_j:
        return None
    return (cell.energy_j / cell.tokens) / (off.energy_j / off.tokens)
