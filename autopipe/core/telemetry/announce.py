"""Running engines announce themselves in a small file each, for `autopipe top`. No text of a request is in it."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from autopipe.core.live_engine import RunningEngine
from autopipe.core.telemetry.energy import EnergyMeter
from autopipe.core.telemetry.runtime_folder import make_private, runtime_folder, write_private
from autopipe.core.telemetry.sampler import Sampler
from autopipe.core.telemetry.tally import WINDOW_S, Tally
from autopipe.core.telemetry.views import PipelineView

VERSION = 1
INTERVAL_S = 0.5
STILL_HERE_S = 5.0
"""How often the file is written while nothing changes."""

_log = logging.getLogger(__name__)
_numbers = itertools.count()


class Announcer:
    """Keeps the announcement of one engine up to date from a thread of its own, until `close`.

    It does not keep the engine alive: an engine that is abandoned is collected, and its file removed. That no
    file can be written is said once in the log, and is no error.

    Args:
        sampler: where energy comes from; None: no energy.
        folder: default: `runtime_folder()`.
    """

    def __init__(self, engine: RunningEngine, sampler: Sampler | None = None, folder: Path | None = None) -> None:
        folder = runtime_folder() if folder is None else folder
        self._file = folder / f"pipeline-{os.getpid()}-{next(_numbers)}.json"
        self._stop = threading.Event()
        self._finalizer = weakref.finalize(engine, _remove, self._file, os.getpid())
        self._thread = threading.Thread(
            target=_announce,
            args=(weakref.ref(engine), self._file, sampler, self._stop),
            name="autopipe-announce",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """End it and remove the file. May be called more than once; in a forked copy it does nothing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._finalizer()


class _EnergyRate:
    """Joules per token over the last seconds."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._meters: list[tuple[float, int, EnergyMeter]] = []

    def look(self, num_tokens: int) -> float | None:
        now_s = time.monotonic()
        self._meters.append((now_s, num_tokens, self._sampler.measure_energy()))
        while len(self._meters) > 2 and self._meters[1][0] <= now_s - WINDOW_S:
            self._meters.pop(0)
        _, tokens_before, meter = self._meters[0]
        return meter.stop(num_tokens - tokens_before).total_j_per_token


def _announce(
    reference: weakref.ref[RunningEngine], file: Path, sampler: Sampler | None, stop: threading.Event
) -> None:
    try:
        make_private(file.parent)
        _write_until(reference, file, sampler, stop)
    except OSError as error:
        _log.info("this pipeline is not shown by `autopipe top`: %s", error)
    except Exception:  # showing a pipeline must not disturb it
        _log.exception("this pipeline is not shown by `autopipe top`")
    finally:
        _remove(file, os.getpid())


def _write_until(
    reference: weakref.ref[RunningEngine], file: Path, sampler: Sampler | None, stop: threading.Event
) -> None:
    facts = {"version": VERSION, "started_at": time.time(), "process_started_at": psutil.Process().create_time()}
    tally, energy = Tally(), None if sampler is None else _EnergyRate(sampler)
    written: PipelineView | None = None
    written_s = 0.0
    while True:
        engine = reference()
        if engine is None:
            return
        view = replace(tally.look(engine), pid=os.getpid())
        del engine
        if energy is not None and view.num_tokens is not None:
            view = replace(view, j_per_token=energy.look(view.num_tokens))
        if view != written or time.monotonic() - written_s > STILL_HERE_S:
            write_private(file, json.dumps({**facts, "updated_at": time.time(), "pipeline": asdict(view)}))
            written, written_s = view, time.monotonic()
        if stop.wait(INTERVAL_S):
            return


def _remove(file: Path, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
