"""Pictures of a search: its history, what mattered, the front of a search with several goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopipe.core.errors import ConfigError
from autopipe.plots.canvas import LEFT_OUT, PALETTE, new_figure, save

_MOST_PARAMETERS = 14


@dataclass(frozen=True, slots=True)
class Point:
    """A trial. `group` colours it; `feasible`: it keeps to all limits."""

    number: int
    value: float
    group: str = ""
    feasible: bool = True


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A trial with several values. `best`: none beats it in all of them."""

    x: float
    y: float
    best: bool
    label: str = ""


def plot_history(
    points: Sequence[Point], path: str | Path, *, value_name: str, maximize: bool, reference: float | None = None
) -> Path:
    """Value of every trial, and the best so far.

    Args:
        reference: value of plain decoding.

    Raises:
        ConfigError: no points, or the file cannot be written.
    """
    if not points:
        raise ConfigError("points", [], "at least one finished trial")
    figure, (axes,) = new_figure(width=8)
    groups = list(dict.fromkeys(point.group for point in points if point.feasible))
    for place, group in enumerate(groups):
        own = [point for point in points if point.group == group and point.feasible]
        color = PALETTE[place % len(PALETTE)]
        axes.scatter([p.number for p in own], [p.value for p in own], s=14, color=color, label=group or "trial")
    left_out = [point for point in points if not point.feasible]
    if left_out:
        numbers, values = [p.number for p in left_out], [p.value for p in left_out]
        axes.scatter(numbers, values, s=14, color=LEFT_OUT, marker="x", label="beyond a limit")
    numbers, best = _best_so_far(points, maximize)
    axes.step(numbers, best, where="post", color="black", linewidth=1.2, label="best so far")
    if reference is not None:
        axes.axhline(reference, color="black", linewidth=0.8, linestyle=":", label="plain decoding")
    axes.set(xlabel="trial", ylabel=value_name, title=f"Simulated search, {len(points)} trials")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return save(figure, path)


def _best_so_far(points: Sequence[Point], maximize: bool) -> tuple[list[int], list[float]]:
    numbers: list[int] = []
    best: list[float] = []
    for point in sorted(points, key=lambda point: point.number):
        if point.feasible:
            value = point.value if not best else (max if maximize else min)(best[-1], point.value)
            numbers.append(point.number)
            best.append(value)
    return numbers, best


def plot_importances(importances: Mapping[str, float], path: str | Path) -> Path:
    """Share of each parameter in how good a plan is (PED-ANOVA), the most important on top.

    Raises:
        ConfigError: none given, or the file cannot be written.
    """
    shown = sorted(importances.items(), key=lambda item: item[1])[-_MOST_PARAMETERS:]
    if not shown:
        raise ConfigError("importances", {}, "at least one parameter")
    figure, (axes,) = new_figure(width=7, height=1.2 + 0.28 * len(shown))
    axes.barh([name for name, _ in shown], [value for _, value in shown], color=PALETTE[0])
    axes.set(xlabel="importance", title="What matters in a plan")
    axes.grid(axis="x", alpha=0.3)
    return save(figure, path)


def plot_front(points: Sequence[FrontPoint], path: str | Path, *, x_name: str, y_name: str) -> Path:
    """Two values of every trial; the front is joined by a line.

    Raises:
        ConfigError: no points, or the file cannot be written.
    """
    if not points:
        raise ConfigError("points", [], "at least one finished trial")
    figure, (axes,) = new_figure(width=7)
    others = [point for point in points if not point.best]
    best = sorted((point for point in points if point.best), key=lambda point: point.x)
    axes.scatter([p.x for p in others], [p.y for p in others], s=12, color=LEFT_OUT, label="trial")
    axes.plot([p.x for p in best], [p.y for p in best], color=PALETTE[1], linewidth=0.8)
    axes.scatter([p.x for p in best], [p.y for p in best], s=26, color=PALETTE[1], label="front", zorder=3)
    for point in best:
        if point.label:
            axes.annotate(point.label, (point.x, point.y), fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.set(xlabel=x_name, ylabel=y_name, title="Pareto front")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return save(figure, path)
