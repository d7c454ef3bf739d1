"""A figure without a display, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autopipe.core.errors import ConfigError

FORMATS = ("png", "svg", "pdf")
PALETTE = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6b4e9b", "#3d405b")
LEFT_OUT = "#c9c9c9"


def new_figure(columns: int = 1, *, width: float = 7.0, height: float = 4.2) -> tuple[Any, list[Any]]:
    """A figure and its axes, side by side; sizes in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot", "matplotlib", "an installed matplotlib (pip install matplotlib)") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def save(figure: Any, path: str | Path) -> Path:
    """Write the figure; the file's ending says how.

    Raises:
        ConfigError: an ending that is not one of `FORMATS`, or a file that cannot be written.
    """
    path = Path(path)
    if path.suffix.lstrip(".").lower() not in FORMATS:
        raise ConfigError("--out", str(path), "a file that ends in " + ", ".join(f".{each}" for each in FORMATS))
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError("--out", str(path), f"a file that can be written ({error})") from None
    return path
