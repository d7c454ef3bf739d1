"""Pictures of profiles, predictions and timelines (matplotlib, drawn without a display)."""

from autopipe.plots.agreement import plot_agreement
from autopipe.plots.latency import plot_latency
from autopipe.plots.predictions import plot_predictions
from autopipe.plots.timeline import plot_timeline
from autopipe.plots.tuning import plot_front, plot_history, plot_importances

__all__ = [
    "plot_agreement",
    "plot_front",
    "plot_history",
    "plot_importances",
    "plot_latency",
    "plot_predictions",
    "plot_timeline",
]
