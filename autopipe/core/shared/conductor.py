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
from autopipe.core.shared.drafting import DraftingConfig, neural_drafters
from autopipe.core.shared.keeper import WorkerKeeper, threads_of
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
        drafters: neural drafters that are loaded, by key: name, and what they said when they were ready.
        kept: plans whose neural drafters stay loaded while no plan in force uses them.
    """

    def __init__(self, plan: Plan, options: SharingOptions, load_timeout_s: float) -> None:
        super().__init__(plan)
        self.cache: Mapping[str, int] = {}
        self.costs: StepCosts | None = None
        self.finishing = FinishRate()
        self.drafters: dict[str, tuple[str, Message]] = {}
        self.kept: Sequence[Plan] = ()
        self.keeper = WorkerKeeper(self.mailbox, options, load_timeout_s)
        self._gate = threading.Lock()
        self._open: dict[int, OpenRequest] = {}
        self._loading: Future[None] | None = None
        self._before: Plan | None = None  # in force before the one that is loading; None: none has been yet
        self._complete = False  # whether a plan has ever been in force with all its drafters
        self._saving: deque[Future[int]] = deque()  # answered in order
        self._losses = 0  # of workers in a row, since one was last ready

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
        self._answer_load(EngineClosedError("the engine was closed"))
        self._fail_saving(EngineClosedError("the engine was closed"))
        self.keeper.close()

    def start_plan(self, plan: Plan, done: Future[None]) -> None:
        if self.mailbox.closed:
            done.set_exception(EngineClosedError("the engine was closed"))
            return
        self._answer_load(AutoPipeError("another plan was applied before this one was ready"))
        self._before, self.plan, self._loading = self.plan if self._complete else None, plan, done
        for request in self._unfinished():
            request.plan_changes += request.begun
        if self.keeper.ready:
            self._configure()
            self._answer_if_complete()
        else:
            self._load()

    def withdraw_plan(self, done: Future[None]) -> None:
        if self._loading is done:
            self._loading = None

    def keep_loaded(self, plans: Sequence[Plan]) -> None:
        """Keep the neural drafters of these plans loaded."""
        self.kept = plans
        if self.keeper.ready:
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
            self.keeper.load(self.plan)
        except OSError as error:
            self._fail_load(AutoPipeError(f"no new process: {error}"))

    def _answer_load(self, error: AutoPipeError | None) -> None:
        loading, self._loading = self._loading, None
        if loading is None:
            return
        if error is None:
            loading.set_result(None)
        else:
            loading.set_exception(error)

    def _answer_if_complete(self) -> None:
        """The plan in force is complete once all its neural drafters are loaded."""
        if all(drafter.key in self.drafters for drafter in neural_drafters(self.plan)):
            self._complete = True
            self._answer_load(None)

    def _fail_load(self, error: AutoPipeError) -> None:
        self.keeper.end()
        self._end_all(self._unfinished(), error)
        self._answer_load(error)

    def _configure(self) -> None:
        kept = {drafter.key: drafter for plan in (self.plan, *self.kept) for drafter in neural_drafters(plan)}
        self.drafters = {key: found for key, found in self.drafters.items() if key in kept}
        self.keeper.send(
            {
                "type": "configure",
                "drafting": DraftingConfig.of(self.plan).model_dump(mode="json"),
                "kept": [drafter.model_dump(mode="json") for drafter in kept.values()],
                "threads": threads_of(self.plan),
            }
        )

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
        elif kind == "drafter-ready":
            self.drafters[message["key"]] = message["name"], message["facts"]
            self._answer_if_complete()
        elif kind == "drafter-failed":
            self._take_failed_drafter(message)
        elif kind == "drafter-lost":
            self.drafters.pop(message["key"], None)
            self._note(f"stage {message['name']!r}: {message['message']}; the others go on without it")
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
        self._answer_if_complete()

    def _take_failed_drafter(self, message: Message) -> None:
        """A neural drafter cannot be loaded: the plan that brought it is refused, or goes on without it."""
        error = rebuild_error(message["error"], message["message"])
        needed = any(drafter.key == message["key"] for drafter in neural_drafters(self.plan))
        if self._loading is None or not needed:
            self._note(f"stage {message['name']!r} cannot be loaded: {error}")
        elif self._before is None:
            self._fail_load(error)
        else:
            self.plan = self._before
            self._configure()
            self._answer_load(error)

    def _take_step(self, step: Message) -> None:
        self.cache = step["cache"]
        if self.costs is not None and not step["prefill"]:
            self.costs.observe(step["rows"], max(step["forward"], 1) / 1e9)
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
        worker, name = self.keeper.worker, neural_names(self.plan)[-1]
        error = TargetDiedError(name, why)
        was_ready = worker is not None and worker.state is WorkerState.READY
        self._losses = 1 if was_ready else self._losses + 1
        if self._losses > _MAX_LOSSES or not self.target_facts:
            self._fail_load(error)
            return
        self.keeper.end()
        self.drafters.clear()
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
