"""Timelines in Chrome's trace format (open the file in Perfetto or chrome://tracing), one lane per stage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class TraceEvent(NamedTuple):
    """One thing a stage did. Times are monotonic nanoseconds, the same clock in every process."""

    name: str
    start_ns: int
    end_ns: int
    tokens: int
    accepted: int


def write_trace(path: str | Path, lanes: Mapping[str, Sequence[TraceEvent]]) -> None:
    """Write lanes (stage name -> events) as a Chrome trace.

    Raises:
        OSError: the file cannot be written.
    """
    starts = [event.start_ns for events in lanes.values() for event in events]
    origin = min(starts, default=0)
    rows: list[dict[str, Any]] = []
    for lane, (stage, events) in enumerate(lanes.items()):
        rows.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": lane, "args": {"name": stage}})
        rows.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": lane, "args": {"sort_index": lane}})
        for event in events:
            rows.append(
                {
                    "ph": "X",
                    "name": event.name,
                    "cat": stage,
                    "pid": 1,
                    "tid": lane,
                    "ts": (event.start_ns - origin) / 1e3,
                    "dur": (event.end_ns - event.start_ns) / 1e3,
                    "args": {"tokens": event.tokens, "accepted": event.accepted},
                }
            )
    Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}), encoding="utf-8")
