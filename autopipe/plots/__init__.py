"""Pictures of profiles, predictions and timelines (matplotlib, drawn without a display)."""

from autopipe.plots.agreement import plot_agreement
from autopipe.plots.latency import plot_latency
from autopipe.plots.predictions import plot_predictions
from autopipe.plots.timeline import plot_timeline

__all__ = ["plot_agreement", "plot_latency", "plot_predictions", "plot_timeline"]
