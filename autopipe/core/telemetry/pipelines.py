"""The pipelines that run on this machine for this user: reads what `announce` writes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from autopipe.core.telemetry.announce import VERSION
from autopipe.core.telemetry.runtime_folder import runtime_folder
from autopipe.core.telemetry.views import PipelineView

_MOST_BYTES = 1 << 16
_LEFT_BEHIND_S = 60.0
_VIEW = TypeAdapter(PipelineView)


def running_pipelines(folder: Path | None = None) -> list[PipelineView]:
    """Every announced pipeline whose process is alive, the oldest first; files that cannot be understood are skipped.

    Files that a process left behind when it was killed are removed after a minute.

    Args:
        folder: default: `runtime_folder()`.
    """
    folder = runtime_folder() if folder is None else folder
    found = []
    for file in sorted(folder.glob("pipeline-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            view = _read(file)
            if view is not None:
                found.append(view)
    return sorted(found, key=lambda view: -(view.age_s or 0.0))


def _read(file: Path) -> PipelineView | None:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        if os.fstat(descriptor).st_uid != os.getuid():
            return None
        data: dict[str, Any] = json.loads(stream.read(_MOST_BYTES))
    if data["version"] != VERSION:
        return None
    view = _VIEW.validate_python(data["pipeline"])
    now = time.time()
    if not _alive(view.pid, float(data["process_started_at"])):
        if now - float(data["updated_at"]) > _LEFT_BEHIND_S:
            file.unlink(missing_ok=True)
        return None
    return replace(
        view,
        age_s=max(0.0, now - float(data["started_at"])),
        silent_s=max(0.0, now - float(data["updated_at"])),
    )


def _alive(pid: int | None, started_at: float) -> bool:
    """Whether the very process still runs: its number may have been given to another one since."""
    try:
        process = psutil.Process(pid if pid is not None else -1)
        return abs(process.create_time() - started_at) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):
        return False
