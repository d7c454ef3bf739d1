"""Predicted against measured milliseconds per token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopipe.core.errors import ConfigError
from autopipe.plots.canvas import PALETTE, new_figure, save

_NEEDED = ("measured_ms_per_token", "predicted_ms_per_token")


def plot_predictions(report: Mapping[str, Any], path: str | Path) -> Path:
    """A point a run, coloured by strategy; on the diagonal a prediction is right, the band is 10% either way.

    Args:
        report: what `autopipe simulate fit --json` prints.

    Raises:
        ConfigError: no predictions in the report, or the file cannot be written.
    """
    predictions = report.get("predictions")
    if not isinstance(predictions, list) or not predictions or not all(_is_prediction(each) for each in predictions):
        raise ConfigError("predictions", type(predictions).__name__, "the output of `autopipe simulate fit --json`")
    figure, (axes,) = new_figure(width=5.4, height=5)
    strategies = list(dict.fromkeys(str(each.get("strategy", "run")) for each in predictions))
    for place, strategy in enumerate(strategies):
        runs = [each for each in predictions if str(each.get("strategy", "run")) == strategy]
        measured, predicted = ([float(run[key]) for run in runs] for key in _NEEDED)
        axes.scatter(measured, predicted, s=22, label=strategy, color=PALETTE[place % len(PALETTE)], zorder=2)
    ends = [float(each[key]) for each in predictions for key in _NEEDED]
    low, high = 0.9 * min(ends), 1.1 * max(ends)
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], alpha=0.12, color="black")
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="measured ms/token", ylabel="predicted ms/token")
    errors = sorted(abs(float(run[_NEEDED[1]]) / float(run[_NEEDED[0]]) - 1) for run in predictions)
    middle = len(errors) // 2
    median = errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2
    axes.set_title(f"{len(errors)} runs, error: median {median:.1%}, worst {errors[-1]:.1%}", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return save(figure, path)


def _is_prediction(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), (int, float)) and entry[key] > 0 for key in _NEEDED
    )
