"""What a shared engine's thread does: pass requests to the worker and tokens to their handles, survive faults.

Its counters may be read from anywhere.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

from autopipe.core.chain import neural_names
from autopipe.core.channel import ChannelClosedError, Message
from autopipe.core.conductor_base import IDLE_WATCH_S, WATCH_S, ConductorBase
from autopipe.core.errors import AutoPipeError, EngineClosedError, TargetDiedError, rebuild_error
from autopipe.core.gating import StepCosts
from autopipe.core.plan import Plan
from autopipe.core.processes import WorkerState
from autopipe.core.remote_processor import process_row
from autopipe.core.request import Outcome, RequestHandle, TokenBlock
from autopipe.core.shared.drafter_book import DrafterBook
from autopipe.core.shared.drafting import neural_drafters
from autopipe.core.shared.keeper import WorkerKeeper
from autopipe.core.shared.ledger import OpenRequest
from autopipe.core.shared.options import SharingOptions
from autopipe.core.shared.throughput import FinishRate
from autopipe.core.stats import StageReport, StageStats

_MAX_LOSSES = 3
"""Workers that may die in a row before everybody who waits is told."""


class SharedConductor(ConductorBase):
    """Runs many requests on one worker.

    Attributes:
        cache: what the worker said last of its prefix cache.
        costs: seconds of a step by rows.
        finishing: how fast requests end.
        drafters: what is known of neural drafters.
    """

    def __init__(self, plan: Plan, options: SharingOptions, load_timeout_s: float) -> None:
        super().__init__(plan)
        self.cache: Mapping[str, int] = {}
        self.costs: StepCosts | None = None
        self.finishing = FinishRate()
        self.drafters = DrafterBook()
        self.keeper = WorkerKeeper(self.mailbox, options, load_timeout_s)
        self._gate = threading.Lock()
        self._open: dict[int, OpenRequest] = {}
        self._pending: tuple[Plan, Future[None]] | None = None  # its drafters are being loaded
        self._complete = False  # whether a plan has ever been in force with all its drafters
        self._saving: deque[Future[int]] = deque()  # answered in order
        self._losses = 0  # of workers in a row, since one last had all it needs, or served

    # -- read from anywhere ---------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """Requests that have begun, and requests that wait."""
        with self._gate:
            running = sum(request.begun for request in self._open.values())
            return running, len(self._open) - running

    def progress(self) -> dict[int, list[StageReport]]:
        """What has been done so far for each request that has begun, by the id of its handle."""
        with self._gate:
            return {number: request.reports() for number, request in self._open.items() if request.begun}

    def first_running(self) -> RequestHandle | None:
        """The request that has run longest."""
        with self._gate:
            return next((request.handle for request in self._open.values() if request.begun), None)

    def admit(self, request: OpenRequest) -> None:
        """Take a request in. Raises EngineClosedError when nobody will serve it."""
        with self._gate:
            self._open[request.handle.id] = request
        try:
            self.mailbox.post(lambda: None)
        except EngineClosedError:
            with self._gate:
                self._open.pop(request.handle.id, None)
            raise

    def new_stats(self) -> StageStats:
        """Empty counters of the target."""
        return StageStats(name=neural_names(self.plan)[-1])

    # -- the thread -----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        busy = bool(self._open) or self.keeper.loading
        self.keeper.listen(WATCH_S if busy else IDLE_WATCH_S)
        self._hear()
        for command in self.mailbox.take():
            command()
        trouble = self.keeper.trouble() if busy else None
        if trouble is not None:
            self._lose(trouble)
        self._send_waiting()

    def _shut_down(self) -> None:
        for command in self.mailbox.take():
            command()
        self._end_all(self._unfinished(), EngineClosedError("the engine was closed"))
        self._answer_pending(EngineClosedError("the engine was closed"))
        self._fail_saving(EngineClosedError("the engine was closed"))
        self.keeper.close()

    def start_plan(self, plan: Plan, done: Future[None]) -> None:
        if self.mailbox.closed:
            done.set_exception(EngineClosedError("the engine was closed"))
            return
        self._answer_pending(AutoPipeError("another plan was applied before this one was ready"))
        self._pending = plan, done
        if not self.keeper.ready:
            self._load()
            return
        self._configure(again=[drafter.key for drafter in neural_drafters(plan)])
        self._finish_pending()

    def withdraw_plan(self, done: Future[None]) -> None:
        if self._pending is not None and self._pending[1] is done:
            self._pending = None
            self._configure()

    def keep_loaded(self, plans: Sequence[Plan]) -> None:
        """Keep the neural drafters of these plans loaded once they are."""
        self.drafters.kept = plans
        self._configure()

    def save_ngrams(self, path: str, done: Future[int]) -> None:
        """Have the worker write what its drafter learned online; `done` gets the number of contexts."""
        if not self.keeper.ready:
            done.set_exception(AutoPipeError("the target is not loaded"))
            return
        self._saving.append(done)
        self.keeper.send({"type": "save-ngrams", "path": path})

    def cancel(self, handle: RequestHandle) -> None:
        request = self._open.get(handle.id)
        if request is not None:
            if request.sent:
                self.keeper.send({"type": "end", "request": handle.id})
            self._end(request, request.outcome("cancelled"))

    def _send_waiting(self) -> None:
        waiting = [request for request in self._unfinished() if not request.sent]
        if not waiting:
            return
        if self.keeper.worker is None:
            self._load()
        if self.keeper.ready:
            for request in waiting:
                request.sent = True
                self.keeper.send(request.begin_message())

    def _unfinished(self) -> list[OpenRequest]:
        with self._gate:
            return list(self._open.values())

    def _end(self, request: OpenRequest, outcome: Outcome | BaseException) -> None:
        with self._gate:
            self._open.pop(request.handle.id, None)
        self.finishing.count()
        request.handle.put_outcome(outcome)

    def _end_all(self, requests: Iterable[OpenRequest], error: AutoPipeError) -> None:
        for request in requests:
            self._end(request, error)

    # -- the worker -----------------------------------------------------------------------------------------

    def _load(self) -> None:
        try:
            kept = [drafter for plan in (self.plan, *self.drafters.kept) for drafter in plan.drafters]
            self.keeper.load(self.plan, kept)
        except OSError as error:
            self._fail_load(AutoPipeError(f"no new process: {error}"))

    def _answer_pending(self, error: AutoPipeError | None) -> None:
        """Tell whoever waits for the pending plan, which is none any more."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if error is None:
            pending[1].set_result(None)
        else:
            pending[1].set_exception(error)

    def _finish_pending(self) -> None:
        """Put the pending plan in force once all its neural drafters are loaded."""
        plan = self.plan if self._pending is None else self._pending[0]
        if not self.drafters.has_all(plan):
            return
        self._complete, self._losses = True, 0
        if self._pending is None:
            return
        if plan is not self.plan:
            self.plan = plan
            for request in self._unfinished():
                request.plan_changes += request.begun
            self._configure()
        self._answer_pending(None)

    def _refuse_pending(self, error: AutoPipeError) -> None:
        """A drafter of the pending plan cannot be had: the plan in force stays; without one, nothing can be done."""
        if not self._complete:
            self._fail_load(error)
            return
        self._answer_pending(error)
        self._configure()

    def _fail_load(self, error: AutoPipeError) -> None:
        self.keeper.end()
        self._end_all(self._unfinished(), error)
        self._answer_pending(error)

    def _configure(self, again: Sequence[str] = ()) -> None:
        """Tell the worker what the plans ask for; `again`: keys of drafters to load although they have failed."""
        if self.keeper.ready:
            pending = None if self._pending is None else self._pending[0]
            self.keeper.send(self.drafters.configuration(self.plan, pending, again))

    def _hear(self) -> None:
        try:
            while (message := self.keeper.hear()) is not None:
                self._obey(message)
        except ChannelClosedError as error:
            self._lose(str(error))

    def _obey(self, message: Message) -> None:
        kind = message["type"]
        if kind == "step":
            self._take_step(message)
        elif kind == "ready":
            self._take_ready(message)
        elif kind == "load-failed":
            self._fail_load(rebuild_error(message["error"], message["message"]))
        elif kind == "step-failed":
            self._lose(f"{message['error']}: {message['message']}")
        elif kind in ("drafter-ready", "drafter-failed", "drafter-lost"):
            if self.drafters.is_current(message):  # else it has been given up meanwhile
                self._take_drafter(kind, message)
        elif kind == "note":
            self._note(message["text"])
        elif kind == "saved-ngrams":
            done = self._saving.popleft()
            if "error" in message:
                done.set_exception(rebuild_error(message["error"], message["message"]))
            else:
                done.set_result(message["contexts"])
        elif kind == "process":
            self._process_row(message)

    def _take_ready(self, message: Message) -> None:
        worker = self.keeper.worker
        if worker is None:
            return
        worker.facts, worker.state = message, WorkerState.READY
        self.target_facts = message
        if self.costs is None:
            self.costs = StepCosts({int(n): ms / 1e3 for n, ms in message["step_ms"].items() if ms > 0})
        self._configure()
        self._finish_pending()

    def _take_drafter(self, kind: str, message: Message) -> None:
        """A neural drafter has been loaded, cannot be, or has raised something while it drafted."""
        key, name = message["key"], message["name"]
        if kind == "drafter-ready":
            self.drafters.enter(message)
            self._finish_pending()
            return
        self.drafters.strike(key)
        error = rebuild_error(message["error"], message["message"])
        if kind == "drafter-lost":
            why = f"{message['error']}: {message['message']}"
            self._note(f"stage {name!r}: {why}; the others go on without it")
        if self._pending is not None and key in {drafter.key for drafter in neural_drafters(self._pending[0])}:
            self._refuse_pending(error)
        elif kind == "drafter-failed":
            self._note(f"stage {name!r} cannot be loaded: {error}")

    def _take_step(self, step: Message) -> None:
        self.cache, self._losses = step["cache"], 0
        if self.costs is not None and not step["prefill"]:
            for num_rows, nanoseconds in step["passes"]:
                self.costs.observe(num_rows, nanoseconds / 1e9)
        for served in step["served"]:
            request = self._open.get(served["request"])
            if request is not None:  # else it was cancelled meanwhile
                self._take_served(request, step, served)

    def _take_served(self, request: OpenRequest, step: Message, served: Message) -> None:
        with self._gate:
            if not request.begun:
                self.recent.append(request.handle)
            request.count(step, served)
        if served["ids"]:
            self.num_tokens += len(served["ids"])
            request.handle.put_tokens(TokenBlock(served["ids"], served.get("logprobs")))
        if "error" in served:
            self._end(request, rebuild_error(*served["error"]))
        elif served["finish"] is not None:
            self._end(request, request.outcome(served["finish"]))

    def _process_row(self, message: Message) -> None:
        request, worker = self._open.get(message["request"]), self.keeper.worker
        if worker is None or request is None or request.handle.processor is None:
            return  # it has ended; the worker has been told, or will be
        try:
            self.keeper.send(process_row(worker.slot, request.handle.processor, message))
        except BaseException as error:  # the user's own code, whatever it raises: the user gets it back
            self.keeper.send({"type": "end", "request": request.handle.id})
            self._end(request, error)

    def _lose(self, why: str) -> None:
        """The worker is gone, or must go: fail what it had begun, and start another one for what it had not."""
        name = neural_names(self.plan)[-1]
        error = TargetDiedError(name, why)
        self._losses += 1
        if self._losses > _MAX_LOSSES or not self.target_facts:
            self._fail_load(error)
            return
        self.keeper.end()
        self.drafters.clear()
        if self._complete:  # a drafter that was being loaded may be the reason
            self._answer_pending(error)
        self._fail_saving(error)
        self._note(f"stage {name!r}: {why}")
        for request in self._unfinished():
            request.losses += request.sent
            request.sent = False
            if request.begun or request.losses > 1:  # whoever was there twice may be the reason
                self._end(request, error)
        self._load()

    def _fail_saving(self, error: AutoPipeError) -> None:
        while self._saving:
            self._saving.popleft().set_exception(error)

    def _note(self, text: str) -> None:
        super()._note(text)
        for request in self._unfinished():
            request.fallbacks.append(text)
