"""The pictures of a report."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import AutoPipeError
from autopipe.plots import plot_front, plot_history, plot_importances, plot_predictions, plot_timeline
from autopipe.plots.tuning import FrontPoint, Point
from autopipe.tune.objective import Goal
from autopipe.tune.result import TuneResult
from autopipe.tune.search import PLAN
from autopipe.tune.space import structure

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

_log = logging.getLogger(__name__)

TITLES = {
    "history": "Search history",
    "importances": "Parameter importances",
    "predictions": "Predicted against measured",
    "front": "Pareto front",
    "timeline": "The winner beside plain decoding",
}
_TIMELINE_MS = 400.0


def draw(result: TuneResult, goals: tuple[Goal, ...], stem: Path, traces: dict[str, Path]) -> dict[str, Path]:
    """Draw what there is to draw, as `STEM-NAME.png`; the files by name. One that fails does not stop the others.

    Args:
        traces: Chrome traces of `plain` and of the `winner`.
    """
    drawers: dict[str, Callable[[Path], Path | None]] = {
        "history": lambda path: _history(result.study, goals, path),
        "importances": lambda path: _importances(result.study, goals, path),
        "predictions": lambda path: _predictions(result, path),
        "front": lambda path: _front(result.study, goals, path),
        "timeline": lambda path: _timeline(traces, path),
    }
    drawn: dict[str, Path] = {}
    for name, drawer in drawers.items():
        try:
            path = drawer(stem.with_name(f"{stem.name}-{name}.png"))
        except AutoPipeError as error:
            _log.warning("no picture %r: %s", name, error)
            continue
        if path is not None:
            drawn[name] = path
    return drawn


def _finished(study: Study) -> list[FrozenTrial]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _history(study: Study | None, goals: tuple[Goal, ...], path: Path) -> Path | None:
    trials = [] if study is None else _finished(study)
    if not trials:
        return None
    points = [
        Point(
            trial.number,
            trial.values[0],
            trial.user_attrs[PLAN].get("mode", "lockstep"),
            all(value <= 0 for value in trial.constraints.values()),
        )
        for trial in trials
    ]
    plain = next((point.value for point in points if point.group == "plain"), None)
    maximize = goals[0].direction == "maximize"
    return plot_history(points, path, value_name=goals[0].name, maximize=maximize, reference=plain)


def _importances(study: Study | None, goals: tuple[Goal, ...], path: Path) -> Path | None:
    found = {} if study is None else importances(study, len(goals) > 1)
    return plot_importances(found, path) if found else None


def importances(study: Study, several: bool) -> dict[str, float]:
    """Of each parameter for the first value (PED-ANOVA); {} where there are too few trials to tell."""
    import optuna

    try:
        return optuna.importance.get_param_importances(
            study,
            evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
            target=(lambda trial: float(trial.values[0])) if several else None,
        )
    except (ValueError, RuntimeError, ZeroDivisionError):
        return {}


def _predictions(result: TuneResult, path: Path) -> Path | None:
    report = {
        "predictions": [
            {
                "strategy": structure(each.plan),
                "measured_ms_per_token": each.ms_per_token,
                "predicted_ms_per_token": each.prediction.ms_per_token,
            }
            for each in result.measured
            if each.ms_per_token
        ]
    }
    return plot_predictions(report, path) if report["predictions"] else None


def _front(study: Study | None, goals: tuple[Goal, ...], path: Path) -> Path | None:
    """Of several goals their first two; of one goal, goodput and memory."""
    trials = [] if study is None else _finished(study)
    if study is None or not trials:
        return None
    if len(goals) > 1:
        best = {trial.number for trial in study.best_trials}
        points = [
            FrontPoint(trial.values[0], trial.values[1], trial.number in best, str(trial.number)) for trial in trials
        ]
        return plot_front(points, path, x_name=goals[0].name, y_name=goals[1].name)
    pairs = [(trial, _goodput(trial), _memory_mib(trial)) for trial in trials]
    points = [
        FrontPoint(x, y, not any(a >= x and b <= y and (a, b) != (x, y) for _, a, b in pairs)) for _, x, y in pairs
    ]
    return plot_front(points, path, x_name="tokens_per_s", y_name="memory, MiB")


def _goodput(trial: FrozenTrial) -> float:
    return float(trial.user_attrs["figures"]["tokens_per_s"])


def _memory_mib(trial: FrozenTrial) -> float:
    return float(sum(trial.user_attrs["figures"]["memory_bytes"].values())) / 2**20


def _timeline(traces: dict[str, Path], path: Path) -> Path | None:
    if "winner" not in traces or "plain" not in traces:
        return None
    merged = beside({name: json.loads(traces[name].read_text(encoding="utf-8")) for name in ("plain", "winner")})
    return plot_timeline(merged, path, length_ms=_TIMELINE_MS)


def beside(traces: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One Chrome trace out of several, each with lanes of its own and beginning at 0."""
    rows: list[dict[str, Any]] = []
    first_lane = 0
    for name, trace in traces.items():
        events = trace["traceEvents"]
        started = min((row["ts"] for row in events if row.get("ph") == "X"), default=0)
        lanes = sorted({row["tid"] for row in events if "tid" in row})
        for row in events:
            moved = {**row, "tid": first_lane + lanes.index(row["tid"])} if "tid" in row else dict(row)
            if moved.get("ph") == "X":
                moved["ts"] = row["ts"] - started
            elif moved.get("name") == "thread_name":
                moved["args"] = {"name": f"{name}: {row['args']['name']}"}
            rows.append(moved)
        first_lane += len(lanes)
    return {"traceEvents": rows}
