"""What every worker process does, whatever it serves: obey its command line, beat, die with the engine."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from autopipe.core.board import Board, Slot
from autopipe.core.channel import Channel, ChannelClosedError, Doorbell

BEAT_S = 0.1
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)

Serve = Callable[[Channel, Board, int, list[Doorbell]], None]
"""(channel to the engine, board, own slot on it, doorbells by slot); returns when told to shut down."""


def run_worker(serve: Serve, heavy: Sequence[str]) -> None:
    """Run `serve` as the process the engine has started with these arguments; does not return.

    Args:
        heavy: modules that a real model needs, imported at once with `--warm`: it takes seconds, in which the engine
            is still checking the plan.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    parser = argparse.ArgumentParser(description="AutoPipe worker; started by the engine, not by hand.")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--board", type=int, required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--bells", default="", help="read:write descriptors, comma-separated")
    parser.add_argument("--warm", action="store_true", help="import what a real model needs at once")
    arguments = parser.parse_args()
    bells = [Doorbell(*map(int, pair.split(":"))) for pair in arguments.bells.split(",") if pair]
    board = Board(arguments.board)
    threading.Thread(target=_beat, args=(arguments.parent, board.slot(arguments.slot)), daemon=True).start()
    if arguments.warm:
        for name in heavy:
            importlib.import_module(name)
    try:
        serve(Channel.from_descriptor(arguments.channel), board, arguments.slot, bells)
    except ChannelClosedError:
        _log.info("the engine is gone")
    os._exit(0)  # nothing to save; skips the slow teardown of threads and libraries


def _beat(parent: int, slot: Slot) -> None:
    """Show signs of life, and leave at once when the parent is gone."""
    while os.getppid() == parent:
        slot.beat_ns = time.monotonic_ns()
        time.sleep(BEAT_S)
    os._exit(0)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the engine's thread ends, even while it is stopped (Linux only)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
