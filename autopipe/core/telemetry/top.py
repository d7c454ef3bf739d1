"""`autopipe top`: a live view of devices and of running pipelines."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError
from autopipe.core.telemetry.sampler import Sampler
from autopipe.core.telemetry.snapshot import Snapshot
from autopipe.core.telemetry.source import TelemetrySource
from autopipe.core.telemetry.views import PipelineView

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_FIRST_READING_WAIT_S = 10.0
_INTERVAL_ONCE_S = 0.4


def render_top(snapshot: Snapshot, pipelines: Sequence[PipelineView] = ()) -> RenderableType:
    """One frame, for rich to print."""
    from autopipe.core.telemetry.render import frame

    return frame(snapshot, pipelines)


def top_to_dict(snapshot: Snapshot, pipelines: Sequence[PipelineView] = ()) -> dict[str, Any]:
    """The same for JSON."""
    return {**snapshot.to_dict(), "pipelines": [asdict(pipeline) for pipeline in pipelines]}


def run_top(
    sources: Sequence[TelemetrySource] | None = None,
    pipelines: Callable[[], Sequence[PipelineView]] | None = None,
    *,
    interval_s: float = 1.0,
    once: bool = False,
    as_json: bool = False,
    num_frames: int | None = None,
    console: Console | None = None,
) -> None:
    """Show devices and pipelines until Ctrl-C.

    On a terminal the view stays in place; else every frame is printed below the last.

    Args:
        sources: default: the CPU and the GPUs CUDA may use.
        pipelines: asked for every frame; `running_pipelines` gives those of this user. None: only devices are shown.
        once: one frame, then return.
        as_json: one JSON object per frame and line.
        num_frames: return after so many frames.

    Raises:
        ConfigError: `interval_s` or `num_frames` out of range.
    """
    if num_frames is not None and num_frames < 1:
        raise ConfigError("num_frames", num_frames, "at least 1")
    frames = 1 if once else num_frames
    sampling_s = min(interval_s, _INTERVAL_ONCE_S) if frames == 1 else interval_s
    with Sampler(sources, interval_s=sampling_s) as sampler:
        # Two sweeps: loads and link rates are differences.
        sampler.wait(_FIRST_READING_WAIT_S, sweeps=2)
        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            _show(sampler, pipelines, interval_s, frames, as_json, console)


def _show(
    sampler: Sampler,
    pipelines: Callable[[], Sequence[PipelineView]] | None,
    interval_s: float,
    frames: int | None,
    as_json: bool,
    console: Console | None,
) -> None:
    from rich.console import Console
    from rich.live import Live

    console = console or Console()

    def views() -> tuple[Snapshot, Sequence[PipelineView]]:
        return sampler.snapshot(), pipelines() if pipelines else ()

    if as_json or frames == 1 or not console.is_terminal:
        shown = 0
        while True:
            if as_json:
                line = json.dumps(top_to_dict(*views()))
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                console.print(render_top(*views()))
            shown += 1
            if shown == frames:
                return
            time.sleep(interval_s)
    with Live(render_top(*views()), console=console, screen=True, auto_refresh=False) as live:
        shown = 1
        while shown != frames:
            time.sleep(interval_s)
            live.update(render_top(*views()), refresh=True)
            shown += 1
