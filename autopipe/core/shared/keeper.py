"""The one worker of a shared engine: started, listened to, watched, ended. Used by the engine's thread only."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence

from autopipe.core.board import Board, create_segment
from autopipe.core.chain import default_threads, neural_names, stage_keys
from autopipe.core.channel import ChannelClosedError, Message
from autopipe.core.isolation import mps_environment
from autopipe.core.mailbox import Mailbox
from autopipe.core.models.shared_base import layers_of_drafters
from autopipe.core.plan import Plan, StagePlan
from autopipe.core.processes import WorkerProcess, WorkerState, start_worker, stop_workers
from autopipe.core.shared.options import SharingOptions

_MODULE = "autopipe.core.shared.worker"
_PATIENCE_S = 15.0
"""How much longer than expected a step, or a sign of life, may take: a late target is better than none."""


def threads_of(plan: Plan) -> int:
    """Compute threads of the target."""
    return plan.target.threads or default_threads(plan)


class WorkerKeeper:
    """Keeps one worker.

    Args:
        mailbox: of the engine's thread; its bell wakes `listen`.
        load_timeout_s: a worker that loads for longer is given up.
    """

    def __init__(self, mailbox: Mailbox, options: SharingOptions, load_timeout_s: float) -> None:
        self.worker: WorkerProcess | None = None
        self._load_timeout_s = load_timeout_s
        self._load_started_s = 0.0
        self._mailbox = mailbox
        self._options = options
        self._descriptor = create_segment()
        self._slot = Board(self._descriptor).slot(0)
        self._poller = select.poll()
        self._poller.register(mailbox.bell.read_descriptor, select.POLLIN)

    @property
    def ready(self) -> bool:
        return self.worker is not None and self.worker.state is WorkerState.READY

    @property
    def loading(self) -> bool:
        return self.worker is not None and self.worker.state in (WorkerState.SPAWNED, WorkerState.LOADING)

    def spawn(self, plan: Plan) -> None:
        """Start a process for the target of `plan`, if there is none."""
        if self.worker is None:
            target = plan.target
            self.worker = start_worker(
                stage_keys(plan)[-1],
                neural_names(plan)[-1],
                self._slot,
                self._descriptor,
                [],
                threads=threads_of(plan),
                warm=not target.is_emulated,
                extra_environment=mps_environment(target.cuda.mps_percent),
                module=_MODULE,
            )
            self._poller.register(self.worker.channel.fileno(), select.POLLIN)

    def load(self, plan: Plan, drafters: Sequence[StagePlan]) -> None:
        """Have the target loaded, if it is not, with the layers that `drafters` are made of to be shared with them."""
        self.spawn(plan)
        worker = self.worker
        if worker is not None and worker.state is WorkerState.SPAWNED:
            worker.state, self._load_started_s = WorkerState.LOADING, time.monotonic()
            worker.send(
                {
                    "type": "load",
                    "stage": plan.target.model_dump(mode="json"),
                    "threads": threads_of(plan),
                    "options": self._options.model_dump(mode="json"),
                    "exact": plan.exact,
                    "shared_layers": layers_of_drafters(drafters, plan.target),
                }
            )

    def send(self, message: Message) -> None:
        if self.worker is not None:
            self.worker.send(message)

    def listen(self, timeout_s: float) -> None:
        """Sleep until the worker has said something or the mailbox rang."""
        worker = self.worker
        if worker is not None:
            wanted = select.POLLIN | (select.POLLOUT if worker.channel.flush() else 0)
            self._poller.modify(worker.channel.fileno(), wanted)
        for descriptor, _ in self._poller.poll(timeout_s * 1e3):
            if descriptor == self._mailbox.bell.read_descriptor:
                self._mailbox.bell.silence()

    def hear(self) -> Message | None:
        """The worker's next message. Raises ChannelClosedError when its process is gone and all has been heard."""
        worker = self.worker
        if worker is None:
            return None
        try:
            return worker.channel.receive()
        except ChannelClosedError:
            code = worker.process.poll()
            raise ChannelClosedError("its process ended" + ("" if code is None else f" (exit code {code})")) from None

    def trouble(self) -> str | None:
        """Why the worker no longer counts on, in words; None while it is well."""
        worker = self.worker
        if worker is None:
            return None
        if worker.state is WorkerState.LOADING and time.monotonic() - self._load_started_s > self._load_timeout_s:
            return f"it was loading for more than {self._load_timeout_s:g} s and has been ended"
        trouble = worker.trouble(time.monotonic_ns() - int(1e9 * _PATIENCE_S))
        return None if trouble is None else f"it was {trouble} and has been ended"

    def end(self) -> None:
        """Kill the worker and forget it."""
        worker, self.worker = self.worker, None
        if worker is not None:
            self._poller.unregister(worker.channel.fileno())
            worker.kill()

    def close(self) -> None:
        """End the worker and give back descriptors and memory."""
        if self.worker is not None:
            stop_workers([self.worker])
            self.worker = None
        del self._slot  # which holds the memory, and a descriptor of its own
        self._mailbox.bell.close()
        os.close(self._descriptor)
