"""All worker processes of one engine: start, place, watch and retire them. Used by the engine's thread only."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator

from autopipe.core.board import MAX_SLOTS, Board, create_segment
from autopipe.core.chain import bound_cores, configure_chain, default_threads, neural_names, neural_stages, stage_keys
from autopipe.core.channel import Doorbell
from autopipe.core.errors import AutoPipeError, EngineClosedError
from autopipe.core.isolation import mps_environment
from autopipe.core.mailbox import Mailbox
from autopipe.core.models.shared_base import layers_of_drafters
from autopipe.core.plan import Plan, StagePlan
from autopipe.core.processes import WorkerProcess, WorkerState, start_worker, stop_workers

MAX_RESTARTS = 3
_TARGET_PATIENCE_S = 15.0
"""How much longer than a drafter the target may be silent: a late target is better than none."""


class Fleet:
    """Workers by stage key (see `chain.stage_keys`), the board they share, and their doorbells.

    Args:
        mailbox: of the engine's thread; its bell wakes `listen`.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.workers: dict[str, WorkerProcess] = {}
        self._mailbox = mailbox
        self._descriptor = create_segment()
        self._board = Board(self._descriptor)
        self._bells = [Doorbell.create() for _ in range(MAX_SLOTS)]
        self._by_descriptor: dict[int, WorkerProcess] = {}
        self._leaving_slots: set[int] = set()
        self._restarts: dict[str, int] = {}
        self._stages: dict[str, StagePlan] = {}  # of the workers
        self._poller = select.poll()
        self._poller.register(mailbox.bell.read_descriptor, select.POLLIN)

    def listen(self, timeout_s: float) -> list[WorkerProcess]:
        """Sleep until a worker has said something or the mailbox rang; return the workers that have."""
        for descriptor, worker in self._by_descriptor.items():
            wanted = select.POLLIN | (select.POLLOUT if worker.channel.flush() else 0)
            self._poller.modify(descriptor, wanted)
        talking = []
        for descriptor, events in self._poller.poll(timeout_s * 1e3):
            if descriptor == self._mailbox.bell.read_descriptor:
                self._mailbox.bell.silence()
            elif events & ~select.POLLOUT and descriptor in self._by_descriptor:
                talking.append(self._by_descriptor[descriptor])
        return talking

    @property
    def loading(self) -> bool:
        return any(worker.state is WorkerState.LOADING for worker in self.workers.values())

    def ready(self, key: str) -> bool:
        worker = self.workers.get(key)
        return worker is not None and worker.state is WorkerState.READY

    def spawn(self, plan: Plan, only: set[str] | None = None) -> None:
        """Start processes for the stages of `plan` (of these, `only` those named) that have none."""
        for key, name, stage in zip(stage_keys(plan), neural_names(plan), neural_stages(plan), strict=True):
            worker = self.workers.get(key)
            if worker is not None:
                worker.name = name
                continue
            if only is not None and key not in only:
                continue
            taken = {other.slot.index for other in self.workers.values()} | self._leaving_slots
            index = next((index for index in range(MAX_SLOTS) if index not in taken), None)
            if index is None:
                raise AutoPipeError(f"more than {MAX_SLOTS} stages are loaded or leaving; try again in a moment")
            slot, threads = self._board.slot(index), stage.threads or default_threads(plan)
            started = start_worker(
                key,
                name,
                slot,
                self._descriptor,
                self._bells,
                threads=threads,
                warm=not stage.is_emulated,
                extra_environment=mps_environment(stage.cuda.mps_percent),
            )
            self.workers[key], self._stages[key] = started, stage
            self._by_descriptor[started.channel.fileno()] = started
            self._poller.register(started.channel.fileno(), select.POLLIN)

    def start(self, plan: Plan, only: set[str] | None = None) -> None:
        """Have the stages of `plan` (of these, `only` those named) loaded, where they are not."""
        self.spawn(plan, only)
        for key, stage in zip(stage_keys(plan), neural_stages(plan), strict=True):
            worker = self.workers.get(key)
            if worker is not None and worker.state is WorkerState.SPAWNED:
                worker.state = WorkerState.LOADING
                worker.send(
                    {
                        "type": "load",
                        "stage": stage.model_dump(mode="json"),
                        "name": worker.name,
                        "exact": plan.exact,
                        "threads": stage.threads or default_threads(plan),
                        "cores": bound_cores(stage),
                        "shared_layers": layers_of_drafters((*plan.drafters, *self._stages.values()), stage),
                    }
                )

    def revive(self, plan: Plan) -> None:
        """Start again what is missing of `plan`; drafters a few times at most."""
        keys = stage_keys(plan)
        for key in keys:
            if key in self.workers or (key != keys[-1] and self._restarts.get(key, 0) >= MAX_RESTARTS):
                continue
            self._restarts[key] = self._restarts.get(key, 0) + 1
            self.start(plan, {key})

    def forgive(self, plan: Plan) -> None:
        """Forget how often the stages of `plan` have died."""
        for key in stage_keys(plan):
            self._restarts.pop(key, None)

    def configure(self, plan: Plan) -> None:
        """Tell every worker its place among those that can run."""
        able = {
            key: worker.slot.index
            for key, worker in self.workers.items()
            if worker.state is WorkerState.READY and not worker.outgrown
        }
        if stage_keys(plan)[-1] in able:
            for key, config in configure_chain(plan, able).items():
                self.workers[key].send({"type": "configure", "config": config.model_dump(mode="json")})

    def retire(self, keep: set[str]) -> list[WorkerProcess]:
        """Unload, in the background, the stages that are not in `keep`; return them."""
        leaving = [worker for key, worker in self.workers.items() if key not in keep]
        for worker in leaving:
            self._forget(worker)
        if leaving:
            slots = {worker.slot.index for worker in leaving}
            self._leaving_slots |= slots

            def stop() -> None:
                stop_workers(leaving)
                with contextlib.suppress(EngineClosedError):
                    self._mailbox.post(lambda: self._leaving_slots.difference_update(slots))

            threading.Thread(target=stop, daemon=True).start()
        return leaving

    def end(self, worker: WorkerProcess) -> None:
        """Kill one worker and forget it."""
        self._forget(worker)
        worker.kill()

    def _forget(self, worker: WorkerProcess) -> None:
        self.workers.pop(worker.key, None)
        self._stages.pop(worker.key, None)
        descriptor = worker.channel.fileno()
        if descriptor >= 0 and self._by_descriptor.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)

    def ended(self) -> list[WorkerProcess]:
        """Workers whose process is gone, though they have not been told to go."""
        return [worker for worker in self.workers.values() if worker.process.poll() is not None]

    def troubled(self, plan: Plan) -> Iterator[tuple[WorkerProcess, str]]:
        """Workers that are silent or hung, and which of the two. The target is given more patience."""
        now_ns, target = time.monotonic_ns(), stage_keys(plan)[-1]
        for worker in list(self.workers.values()):
            patience_s = _TARGET_PATIENCE_S if worker.key == target else 0.0
            trouble = worker.trouble(now_ns - int(1e9 * patience_s))
            if trouble:
                yield worker, trouble

    def close(self) -> None:
        """End all workers and give back descriptors and memory."""
        stop_workers(list(self.workers.values()))
        self.workers.clear()
        for bell in (*self._bells, self._mailbox.bell):
            bell.close()
        os.close(self._descriptor)
