"""The engine's side of a worker process: start it, talk to it, notice that it is gone, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from autopipe.core.board import Slot
from autopipe.core.channel import Channel, ChannelClosedError, Doorbell, Message

SILENT_S = 0.7
"""A worker that has shown no sign of life for this long counts as stopped."""


class WorkerState(Enum):
    SPAWNED = "spawned"
    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One worker as the engine sees it.

    Attributes:
        key: stage key (see `chain.stage_keys`).
        facts: what it said of itself when ready: vocab_size, max_length, exact, choice, load_s, step_ms.
        request: the request it was last told to begin, until it has answered its end.
    """

    key: str
    name: str
    slot: Slot
    process: subprocess.Popen[bytes]
    channel: Channel
    state: WorkerState = WorkerState.SPAWNED
    facts: Message = field(default_factory=dict)
    request: int | None = None
    outgrown: bool = False

    def send(self, message: Message) -> None:
        """Send, unless it is dead; the death itself is noticed by the engine's loop."""
        if self.state is WorkerState.DEAD:
            return
        try:
            self.channel.send(message)
        except ChannelClosedError:
            return

    def trouble(self, now_ns: int) -> str | None:
        """Why this worker no longer counts on: "silent" or "hung"; None while it is well."""
        beat, deadline = self.slot.beat_ns, self.slot.deadline_ns
        if self.state is WorkerState.READY and beat and now_ns - beat > SILENT_S * 1e9:
            return "silent"
        if deadline and now_ns > deadline:
            return "hung"
        return None

    def kill(self) -> None:
        """End it now and reap it."""
        self.state = WorkerState.DEAD
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.channel.close()


def start_worker(
    key: str,
    name: str,
    slot: Slot,
    board_descriptor: int,
    bells: Sequence[Doorbell],
    *,
    threads: int,
    warm: bool,
    extra_environment: Mapping[str, str] | None = None,
    module: str = "autopipe.core.worker",
) -> WorkerProcess:
    """Start `python -m` module; unlike multiprocessing's spawn this never runs the user's script again.

    With `warm` it imports what a real model needs at once, before it is told which.
    """
    slot.clear()
    ours, theirs = Channel.pair()
    bell_list = ",".join(f"{bell.read_descriptor}:{bell.write_descriptor}" for bell in bells)
    descriptors = {theirs.fileno(), board_descriptor}.union(*(bell.descriptors() for bell in bells))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        **(extra_environment or {}),
    }
    environment.setdefault("TRANSFORMERS_VERBOSITY", "error")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module]
        + ["--channel", str(theirs.fileno()), "--board", str(board_descriptor), "--slot", str(slot.index)]
        + ["--parent", str(os.getpid()), "--bells", bell_list]
        + (["--warm"] if warm else []),
        pass_fds=sorted(descriptors),
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C reaches the engine alone
    )
    theirs.close()
    return WorkerProcess(key, name, slot, process, ours)


def stop_workers(workers: Sequence[WorkerProcess], grace_s: float = 1.0) -> None:
    """Ask workers to leave, and end those that do not within `grace_s` seconds."""
    for worker in workers:
        worker.send({"type": "shutdown"})
    deadline = time.monotonic() + grace_s
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        worker.kill()
