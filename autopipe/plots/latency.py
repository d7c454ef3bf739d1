"""Latency curves: seconds of a forward by its number of tokens."""

from __future__ import annotations

from pathlib import Path

from autopipe.plots.canvas import PALETTE, new_figure, save
from autopipe.profile.model import Profile

_STYLES = ("-", "--", ":", "-.")


def plot_latency(profile: Profile, path: str | Path) -> Path:
    """t(n) of every stage: one colour a stage and thread count, one line style a context.

    Left in milliseconds, right in multiples of a forward of one token: the price of a window.

    Raises:
        ConfigError: the file cannot be written in the format of its ending.
    """
    figure, (absolute, relative) = new_figure(2, width=10)
    lines = [(stage, curves) for stage in profile.stages for curves in stage.curves]
    for place, (stage, curves) in enumerate(lines):
        contexts = sorted({point.context for point in curves.verify})
        for number, context in enumerate(contexts):
            points = sorted((point.tokens, 1e3 * point.seconds) for point in curves.verify if point.context == context)
            tokens, milliseconds = zip(*points, strict=True)
            style = {"color": PALETTE[place % len(PALETTE)], "linestyle": _STYLES[number % len(_STYLES)]}
            plural = "s" if curves.threads > 1 else ""
            label = f"{stage.name}, {curves.threads} thread{plural}, context {context}"
            absolute.plot(tokens, milliseconds, label=label, marker=".", **style)
            relative.plot(tokens, [value / milliseconds[0] for value in milliseconds], marker=".", **style)
    for axes, title in ((absolute, "ms per forward"), (relative, "times a forward of one token")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens in the forward")
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.grid(alpha=0.3)
    absolute.legend(fontsize=7)
    figure.suptitle("Latency of a forward")
    return save(figure, path)
