"""The process of one stage: `python -m autopipe.core.worker`, started by the engine.

It obeys the engine's messages between steps and otherwise runs its stage's loop, asleep while there is nothing
to do. It dies with its parent, and it says so every 0.1 s that it lives.
"""

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
from typing import Any

from autopipe.core.board import Board
from autopipe.core.channel import Channel, ChannelClosedError, Doorbell
from autopipe.core.stage_server import StageServer

BEAT_S = 0.1
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


def _import_heavy() -> None:
    """Import what takes seconds while the engine is still checking the plan."""
    for name in ("transformers.models.auto.configuration_auto", "autopipe.core.backends.fused", "autopipe.core.stage"):
        importlib.import_module(name)


def _watch(parent: int, slot: Any) -> None:
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


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    parser = argparse.ArgumentParser(description="AutoPipe stage worker; started by the engine, not by hand.")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--board", type=int, required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--bells", required=True, help="read:write descriptors, comma-separated")
    parser.add_argument("--warm", action="store_true", help="import what a real model needs at once")
    arguments = parser.parse_args()
    bells = [Doorbell(*map(int, pair.split(":"))) for pair in arguments.bells.split(",")]
    board = Board(arguments.board)
    slot = board.slot(arguments.slot)
    threading.Thread(target=_watch, args=(arguments.parent, slot), daemon=True).start()
    if arguments.warm:
        _import_heavy()
    server = StageServer(Channel.from_descriptor(arguments.channel), board, arguments.slot, bells)
    try:
        server.run()
    except ChannelClosedError:
        _log.info("the engine is gone")
    os._exit(0)  # nothing to save; skips the slow teardown of threads and libraries


if __name__ == "__main__":
    main()
