"""Who computed what, and what was rolled back: a picture of a Chrome trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopipe.core.errors import ConfigError
from autopipe.plots.canvas import LEFT_OUT, PALETTE, new_figure, save

COLORS = {"prefill": PALETTE[4], "draft": PALETTE[3], "verify": PALETTE[0], "decode": PALETTE[2]}
"""By what a stage did (see `core.stage`)."""
ROLL_BACK = "roll back"
_HEIGHT = 0.7


def plot_timeline(
    trace: Mapping[str, Any], path: str | Path, *, start_ms: float = 0.0, length_ms: float | None = None
) -> Path:
    """One lane a stage, the target at the bottom; a bar a forward.

    The grey part of a verification is the share of its rows that came to nothing (rejected drafts); a red mark
    is a roll-back.

    Args:
        trace: a Chrome trace that `autopipe run --trace` wrote.
        start_ms, length_ms: the stretch to show; None: to the end.

    Raises:
        ConfigError: not such a trace, nothing in the stretch, or the file cannot be written.
    """
    lanes, events = _read(trace)
    end_ms = start_ms + length_ms if length_ms is not None else float("inf")
    shown = [event for event in events if event["ts"] / 1e3 < end_ms and _end_ms(event) >= start_ms]
    if not shown:
        raise ConfigError("--start-ms", start_ms, f"a stretch of the trace, 0 to {max(map(_end_ms, events)):.0f} ms")
    figure, (axes,) = new_figure(width=11, height=1.4 + 0.75 * len(lanes))
    row = {lane: len(lanes) - 1 - place for place, lane in enumerate(sorted(lanes))}
    labelled: set[str] = set()
    for event in shown:
        name, at = str(event["name"]), row[event["tid"]]
        left, width = event["ts"] / 1e3, event["dur"] / 1e3
        if name == ROLL_BACK:
            label = None if name in labelled else name
            axes.plot([left], [at + _HEIGHT / 2], marker="v", color=PALETTE[1], markersize=5, label=label, zorder=3)
        else:
            kept = _kept_share(event)
            label = None if name in labelled else name
            axes.barh(at, width * kept, _HEIGHT, left, color=COLORS.get(name, PALETTE[5]), label=label)
            if kept < 1:
                label = None if "rejected" in labelled else "rejected"
                axes.barh(at, width * (1 - kept), _HEIGHT, left + width * kept, color=LEFT_OUT, label=label)
                labelled.add("rejected")
        labelled.add(name)
    axes.set_yticks([row[lane] for lane in lanes], [lanes[lane] for lane in lanes])
    axes.set_xlabel("ms since the first event")
    last_ms = max(map(_end_ms, shown))
    axes.set_xlim(start_ms, min(end_ms, last_ms))
    axes.legend(fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, 1.0 + 0.32 / len(lanes)))
    return save(figure, path)


def _read(trace: Mapping[str, Any]) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Lane names by number, and events in order of time."""
    rows = trace.get("traceEvents")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("TRACE", type(rows).__name__, "a Chrome trace (`autopipe run --trace FILE`)")
    lanes: dict[int, str] = {}
    events: list[dict[str, Any]] = []
    for row in rows:
        if row.get("ph") == "M" and row.get("name") == "thread_name":
            lanes[row["tid"]] = str(row["args"]["name"])
        elif row.get("ph") == "X" and {"tid", "ts", "dur", "name"} <= row.keys():
            events.append(row)
            lanes.setdefault(row["tid"], str(row["tid"]))
    if not events:
        raise ConfigError("TRACE", "no events", "a Chrome trace of a request that ran")
    return lanes, sorted(events, key=lambda event: float(event["ts"]))


def _end_ms(event: Mapping[str, Any]) -> float:
    return (float(event["ts"]) + float(event["dur"])) / 1e3


def _kept_share(event: Mapping[str, Any]) -> float:
    """Share of a verification's rows that became output: accepted drafts and the stage's own token."""
    arguments = event.get("args") or {}
    tokens = arguments.get("tokens", 0)
    if event["name"] != "verify" or not tokens:
        return 1.0
    return min(1.0, (float(arguments.get("accepted", 0)) + 1) / float(tokens))
