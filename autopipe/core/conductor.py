"""What the engine's thread does: hand the pipeline from one request to the next, listen to workers, survive faults."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future

from autopipe.core.chain import stage_keys
from autopipe.core.channel import ChannelClosedError, Message
from autopipe.core.conductor_base import IDLE_WATCH_S, WATCH_S, ConductorBase
from autopipe.core.errors import (
    AutoPipeError,
    EngineClosedError,
    ModelLoadError,
    TargetDiedError,
    rebuild_error,
)
from autopipe.core.fleet import Fleet
from autopipe.core.plan import Plan
from autopipe.core.plan_switch import PlanSwitch
from autopipe.core.processes import WorkerProcess, WorkerState
from autopipe.core.remote_processor import process_row
from autopipe.core.request import Outcome, RequestHandle, RunningRequest, TokenBlock, check_request
from autopipe.core.stats import RequestStats, StageStats, progress_stats
from autopipe.core.trace import TraceEvent


class Conductor(ConductorBase):
    """Runs requests one after another on the workers of a plan.

    Attributes:
        running: the request under way.
        kept: keys of drafters that stay loaded when no plan uses them.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.running: RunningRequest | None = None
        self.fleet = Fleet(self.mailbox)
        self.kept: set[str] = set()
        self._waiting: deque[RequestHandle] = deque()
        self._saving: dict[int, Future[int]] = {}
        self._switch = PlanSwitch(self.fleet, self._retire)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    def _turn(self) -> None:
        busy = self.running is not None or self.fleet.loading
        for worker in self.fleet.listen(WATCH_S if busy else IDLE_WATCH_S):
            self._hear(worker)
        for command in self.mailbox.take():
            command()
        self._watch()
        self._finish_if_done()
        self._settle_plan()
        self._start_next()

    def _shut_down(self) -> None:
        error = EngineClosedError("the engine was closed")
        if self.running:
            self.running.handle.put_outcome(error)
            self.running = None
        for command in self.mailbox.take():
            command()
        for handle in self._waiting:
            handle.put_outcome(error)
        self._waiting.clear()
        self._switch.drop(error)
        for done in self._saving.values():
            done.set_exception(error)
        self._saving.clear()
        self.fleet.close()

    # -- requests -------------------------------------------------------------------------------------------

    def enqueue(self, handle: RequestHandle) -> None:
        if self.mailbox.closed:
            handle.put_outcome(EngineClosedError("the engine was closed"))
        else:
            self._waiting.append(handle)

    def cancel(self, handle: RequestHandle) -> None:
        if self.running is not None and self.running.handle is handle:
            if self.running.finish_reason is None:
                self._finish("cancelled")
        elif handle in self._waiting:
            self._waiting.remove(handle)
            handle.put_outcome(Outcome("cancelled", RequestStats(), {}))

    def _start_next(self) -> None:
        if self.running is not None or not self._waiting:
            return
        if self._switch.waits_for_idle:
            return
        self.fleet.revive(self.plan)
        if not self.fleet.ready(stage_keys(self.plan)[-1]):
            return
        handle = self._waiting.popleft()
        try:
            check_request(handle.prompt, handle.params, self.target_facts)
        except AutoPipeError as error:  # another target has taken over since it was submitted
            handle.put_outcome(error)
            return
        handle.begun_s = time.monotonic()
        self.recent.append(handle)
        self.running = RunningRequest(handle, self.plan.verification)
        for worker in self.fleet.workers.values():
            worker.outgrown = False
        self.fleet.configure(self.plan)
        self._begin_on_workers()

    def _begin_on_workers(self) -> None:
        """Tell every worker of the chain that has not heard of it about the request under way."""
        running = self.running
        if running is None or running.finish_reason is not None:
            return
        for place, key in enumerate(reversed(stage_keys(self.plan))):
            worker = self.fleet.workers.get(key)
            if worker is None or worker.state is not WorkerState.READY or worker.outgrown:
                continue
            if worker.request != running.handle.id:
                worker.request = running.handle.id
                running.awaited.add(key)
                worker.send(running.begin_message(place, self.target_facts["vocab_size"]))

    def _finish(self, reason: str) -> None:
        running = self.running
        if running is None:
            return
        running.finish_reason, running.finished_s = reason, time.monotonic()
        for worker in self.fleet.workers.values():
            if worker.request == running.handle.id:
                worker.send({"type": "end", "request": running.handle.id})

    def _finish_if_done(self) -> None:
        running = self.running
        if running is not None and running.is_over(stage_keys(self.plan)[-1]):
            self.running = None
            running.handle.put_outcome(running.outcome(self.plan))

    def _fail_all(self, error: Exception) -> None:
        running = self.running
        if running is not None:
            self._finish(running.finish_reason or "cancelled")
            self.running = None
            ended = running.finish_reason in ("stop", "length")
            running.handle.put_outcome(running.outcome(self.plan) if ended else error)
        for handle in self._waiting:
            handle.put_outcome(error)
        self._waiting.clear()

    # -- what was learned -----------------------------------------------------------------------------------

    def save_ngrams(self, path: str, done: Future[int]) -> None:
        """Have the stage behind the n-gram drafter write what it learned online; `done` gets the number of contexts."""
        worker = self.fleet.workers.get(stage_keys(self.plan)[0])
        if self.mailbox.closed or worker is None or worker.state is not WorkerState.READY:
            done.set_exception(EngineClosedError("the stage that learns is not running"))
            return
        number = max(self._saving, default=0) + 1
        self._saving[number] = done
        worker.send({"type": "save-ngrams", "number": number, "path": path})

    def _saved_ngrams(self, message: Message) -> None:
        done = self._saving.pop(message["number"], None)
        if done is not None and "error" in message:
            done.set_exception(rebuild_error(message["error"], message["message"]))
        elif done is not None:
            done.set_result(message["contexts"])

    # -- plans ----------------------------------------------------------------------------------------------

    def start_plan(self, plan: Plan, done: Future[None]) -> None:
        if self.mailbox.closed:
            done.set_exception(EngineClosedError("the engine was closed"))
        else:
            self._switch.start(self.plan, plan, done)

    def withdraw_plan(self, done: Future[None]) -> None:
        self._switch.withdraw(done)

    def _settle_plan(self) -> None:
        settled = self._switch.settle(idle=self.running is None)
        if settled is None:
            return
        self.plan, done = settled
        keys = stage_keys(self.plan)
        self.target_facts = self.fleet.workers[keys[-1]].facts
        if self.running is not None:
            self.running.plan_changes += 1
        self.fleet.configure(self.plan)
        self._begin_on_workers()
        self._retire(set(keys))
        done.set_result(None)

    def _retire(self, keep: set[str]) -> None:
        """Unload the stages that are not in `keep`, remembering what they did for the request under way."""
        for worker in self.fleet.retire(keep | self.kept):
            self._part_with(worker)

    def _part_with(self, worker: WorkerProcess) -> None:
        """Take a leaving stage's figures so far."""
        running = self.running
        if running is None:
            return
        running.awaited.discard(worker.key)
        so_far = progress_stats(worker.slot, worker.name, running.handle.id)
        if so_far is not None and worker.key not in running.stats:
            running.gone.append(so_far)

    # -- workers --------------------------------------------------------------------------------------------

    def _hear(self, worker: WorkerProcess) -> None:
        try:
            while worker.state is not WorkerState.DEAD:
                message = worker.channel.receive()
                if message is None:
                    return
                self._obey(worker, message)
        except ChannelClosedError:
            code = worker.process.poll()
            self._lose(worker, "its process ended" + ("" if code is None else f" (exit code {code})"))

    def _obey(self, worker: WorkerProcess, message: Message) -> None:
        kind, running = message["type"], self.running
        if kind == "ready":
            worker.facts, worker.state = message, WorkerState.READY
            self._switch.load_errors.pop(worker.key, None)
            if self._switch.pending is None:
                self.fleet.configure(self.plan)
                self._begin_on_workers()
        elif kind == "load-failed":
            self._switch.load_errors[worker.key] = rebuild_error(message["error"], message["message"])
            self._lose(worker, f"it could not be loaded: {message['message']}")
        elif kind == "step-failed":
            self._lose(worker, f"{message['error']}: {message['message']}")
        elif kind == "outgrown":
            if running is None or message["request"] != running.handle.id:
                return
            worker.outgrown = True
            self._note(f"stage {worker.name!r}: the text outgrew its context of {message['max_length']} tokens")
            self.fleet.configure(self.plan)
        elif kind == "saved-ngrams":
            self._saved_ngrams(message)
        elif kind == "note":
            self._note(f"stage {worker.name!r}: {message['text']}")
        elif kind == "ended":
            if worker.request == message["request"]:
                worker.request = None
            if running is not None and message["request"] == running.handle.id:
                running.awaited.discard(worker.key)
                stats = {**message["stats"], "name": worker.name}
                running.stats[worker.key] = StageStats.from_message(stats)
                running.traces[worker.name] = [TraceEvent(*event) for event in message["trace"]]
        elif running is None or message["request"] != running.handle.id or running.finish_reason is not None:
            return  # of a request that is over
        elif kind == "tokens":
            self.num_tokens += len(message["ids"])
            running.handle.put_tokens(TokenBlock(message["ids"], message.get("logprobs")))
            if message["finish"] is not None:
                self._finish(message["finish"])
        elif kind == "process":
            self._process_row(worker, running.handle, message)
        elif kind == "request-failed":
            self._request_failed(worker, rebuild_error(message["error"], message["message"]))

    def _request_failed(self, worker: WorkerProcess, error: AutoPipeError) -> None:
        """A stage could choose no token: without its target the request is lost, without a drafter only slower."""
        if self.running is not None and worker.key == stage_keys(self.plan)[-1]:
            self.running.handle.put_outcome(error)
            self._finish("cancelled")
        else:
            worker.outgrown = True
            self._note(f"stage {worker.name!r} left the request: {error}")
            self.fleet.configure(self.plan)

    def _process_row(self, worker: WorkerProcess, handle: RequestHandle, message: Message) -> None:
        if handle.processor is None:
            return
        try:
            worker.send(process_row(worker.slot, handle.processor, message))
        except BaseException as error:  # the user's own code, whatever it raises: the user gets it back
            handle.put_outcome(error)
            self._finish("cancelled")

    def _watch(self) -> None:
        for worker in self.fleet.ended():
            self._hear(worker)
        if self.running is not None:
            for worker, trouble in self.fleet.troubled(self.plan):
                self._lose(worker, f"it was {trouble} and has been ended")

    def _lose(self, worker: WorkerProcess, why: str) -> None:
        """Go on without a worker."""
        if worker.state is WorkerState.DEAD:
            return
        self._part_with(worker)
        self.fleet.end(worker)
        pending = self._switch.needs(worker.key)
        if pending or not worker.facts:
            self._switch.load_errors.setdefault(worker.key, ModelLoadError(f"stage {worker.name!r}: {why}"))
        if not pending:
            self._note(f"stage {worker.name!r}: {why}")
        if worker.key == stage_keys(self.plan)[-1]:
            self._fail_all(self._switch.load_errors.get(worker.key) or TargetDiedError(worker.name, why))
        else:
            self.fleet.configure(self.plan)

    def _note(self, text: str) -> None:
        super()._note(text)
        if self.running is not None:
            self.running.fallbacks.append(text)
