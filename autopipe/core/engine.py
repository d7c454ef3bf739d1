"""The engine: keeps a plan's stages running as processes, feeds them requests, survives their faults.

One thread of its own does everything: it listens to the workers and to commands from callers, watches for dead,
silent and hung workers, and hands the pipeline from one request to the next. Callers only ever put a command on
its queue and wait on a handle.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from autopipe.core.chain import stage_keys
from autopipe.core.channel import ChannelClosedError, Message
from autopipe.core.errors import (
    AutoPipeError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    ModelLoadError,
    TargetDiedError,
    rebuild_error,
)
from autopipe.core.fleet import Fleet
from autopipe.core.plan import Plan
from autopipe.core.processes import WorkerProcess, WorkerState
from autopipe.core.request import Outcome, RequestHandle, RowProcessor, RunningRequest, TokenBlock
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import RequestStats, StageStats
from autopipe.core.trace import TraceEvent

_log = logging.getLogger(__name__)

_WATCH_S = 0.1
_IDLE_WATCH_S = 1.0


class Engine:
    """A pipeline of stages in processes of their own.

    Args:
        plan: what to run. Its target and drafters are loaded before the constructor returns.
        preflight: called before anything loads, while the processes are starting; what it raises is raised.
        load_timeout_s: seconds the models may take to load.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError: the plan cannot run; the message says why.
    """

    def __init__(
        self, plan: Plan, *, preflight: Callable[[], None] = lambda: None, load_timeout_s: float = 600.0
    ) -> None:
        self._plan = plan
        self._load_timeout_s = load_timeout_s
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[RequestHandle] = deque()
        self._running: RunningRequest | None = None
        self._pending_plan: tuple[Plan, Future[None]] | None = None
        self._load_errors: dict[str, AutoPipeError] = {}
        self._target_facts: Message = {}
        self._fallbacks: list[str] = []
        self._numbers = itertools.count(1)
        self._closed = False
        self._close_done = threading.Event()
        self._fleet = Fleet(_weakly(weakref.WeakMethod(self._call)))
        reference = weakref.ref(self)
        self._thread = threading.Thread(target=_run, args=(reference,), name="autopipe-engine", daemon=True)
        self._thread.start()
        self._exit_hook = _weakly(weakref.WeakMethod(self.close))
        atexit.register(self._exit_hook)
        try:
            self._call(lambda: self._fleet.spawn(plan))
            preflight()
            self.apply(plan)
        except BaseException:
            self.close()
            raise

    # -- callers' side --------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._plan

    @property
    def fallbacks(self) -> list[str]:
        """What has not gone as planned so far, in words."""
        return list(self._fallbacks)

    @property
    def worker_ids(self) -> dict[str, int]:
        """Process id of each live stage by name."""
        return {worker.name: worker.process.pid for worker in list(self._fleet.workers.values())}

    def facts(self, stage: str) -> Message:
        """What a stage said when it was ready: vocab_size, max_length, exact, choice, load_s, step_ms; {} before."""
        workers = list(self._fleet.workers.values())
        return next((dict(worker.facts) for worker in workers if worker.name == stage), {})

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
        processor: RowProcessor | None = None,
        trace: bool = False,
    ) -> RequestHandle:
        """Queue a request.

        Args:
            eos_token_ids: the model's own; `params.eos_token_ids` overrides them.
            processor: changes the target's logits at each verified position; runs in the engine's thread.

        Raises:
            ConfigError: an empty prompt or a token id outside the vocabulary.
            ContextLengthError: prompt and max_new_tokens do not fit the target's context.
            EngineClosedError: the engine is closed.
        """
        self._check_open()
        eos = tuple(eos_token_ids) if params.eos_token_ids is None else params.eos_token_ids
        self._check_request(prompt, params)
        handle = RequestHandle(next(self._numbers), list(prompt), params, eos, processor, trace, self._cancel)
        self._call(lambda: self._enqueue(handle))
        return handle

    def apply(self, plan: Plan, timeout_s: float | None = None) -> None:
        """Put a plan in force; also in the middle of a request, whose output it does not change.

        Windows change at once; new drafters are loaded first and join when ready; a new target waits until
        the request under way is done. The verification rule changes with the next request.

        Raises:
            AutoPipeError: a stage of the new plan cannot be loaded; the old plan stays in force.
        """
        self._check_open()
        done: Future[None] = Future()
        self._call(lambda: self._start_plan(plan, done))
        seconds = timeout_s if timeout_s is not None else self._load_timeout_s
        try:
            done.result(seconds)
        except TimeoutError:
            raise AutoPipeError(f"the plan is not in force after {seconds:g} s: its models are loading") from None

    def close(self) -> None:
        """End all workers and fail what waits. May be called more than once."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._exit_hook)
            self._fleet.wake.ring()
        if threading.current_thread() is not self._thread:
            self._close_done.wait(10)
            self._thread.join(10)

    def __del__(self) -> None:
        if not self._close_done.is_set():
            self._closed = True
            self._shut_down()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new one")

    def _check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise ConfigError("prompt", list(prompt), "at least one token")
        vocab_size, limit = self._target_facts["vocab_size"], self._target_facts["max_length"]
        bad = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ConfigError("prompt", bad, f"token ids from 0 to {vocab_size - 1}")
        needed = len(prompt) + params.max_new_tokens
        if needed > limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and max_new_tokens is {params.max_new_tokens}: together "
                f"{needed}, the target's context holds {limit}; shorten the prompt or lower max_new_tokens"
            )

    def _call(self, command: Callable[[], None]) -> None:
        """Have the engine's thread do something."""
        self._commands.put(command)
        if not self._closed:
            self._fleet.wake.ring()

    def _cancel(self, handle: RequestHandle) -> None:
        if not self._closed:
            self._call(lambda: self._cancel_now(handle))

    # -- the engine's thread --------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """One turn of the engine's loop; False when it is over."""
        if self._closed:
            self._shut_down()
            return False
        busy = self._running is not None or self._fleet.loading
        for worker in self._fleet.listen(_WATCH_S if busy else _IDLE_WATCH_S):
            self._hear(worker)
        while not self._commands.empty():
            self._commands.get()()
        self._watch()
        self._finish_if_done()
        self._settle_plan()
        self._start_next()
        return True

    def _shut_down(self) -> None:
        error = EngineClosedError("the engine was closed")
        if self._running:
            self._running.handle.put_outcome(error)
            self._running = None
        while not self._commands.empty():
            self._commands.get()()
        for handle in self._waiting:
            handle.put_outcome(error)
        self._waiting.clear()
        if self._pending_plan:
            self._pending_plan[1].set_exception(error)
        self._fleet.close()
        self._close_done.set()

    # requests

    def _enqueue(self, handle: RequestHandle) -> None:
        if self._closed:
            handle.put_outcome(EngineClosedError("the engine was closed"))
        else:
            self._waiting.append(handle)

    def _cancel_now(self, handle: RequestHandle) -> None:
        if self._running is not None and self._running.handle is handle:
            if self._running.finish_reason is None:
                self._finish("cancelled")
        elif handle in self._waiting:
            self._waiting.remove(handle)
            handle.put_outcome(Outcome("cancelled", RequestStats(), {}))

    def _start_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        if self._pending_plan is not None and self._changes_target(self._pending_plan[0]):
            return
        self._fleet.revive(self._plan)
        if not self._fleet.ready(stage_keys(self._plan)[-1]):
            return
        handle = self._waiting.popleft()
        try:
            self._check_request(handle.prompt, handle.params)
        except AutoPipeError as error:  # another target has taken over since it was submitted
            handle.put_outcome(error)
            return
        handle.begun_s = time.monotonic()
        self._running = RunningRequest(handle, self._plan.verification)
        for worker in self._fleet.workers.values():
            worker.outgrown = False
        self._fleet.configure(self._plan)
        self._begin_on_workers()

    def _begin_on_workers(self) -> None:
        """Tell every worker of the chain that has not heard of it about the request under way."""
        running = self._running
        if running is None or running.finish_reason is not None:
            return
        for place, key in enumerate(reversed(stage_keys(self._plan))):
            worker = self._fleet.workers.get(key)
            if worker is None or worker.state is not WorkerState.READY or worker.outgrown:
                continue
            if worker.request != running.handle.id:
                worker.request = running.handle.id
                running.awaited.add(key)
                worker.send(running.begin_message(place, self._target_facts["vocab_size"]))

    def _finish(self, reason: str) -> None:
        running = self._running
        if running is None:
            return
        running.finish_reason, running.finished_s = reason, time.monotonic()
        for worker in self._fleet.workers.values():
            if worker.request == running.handle.id:
                worker.send({"type": "end", "request": running.handle.id})

    def _finish_if_done(self) -> None:
        running = self._running
        if running is not None and running.is_over(stage_keys(self._plan)[-1]):
            self._running = None
            running.handle.put_outcome(running.outcome(self._plan))

    def _fail_all(self, error: Exception) -> None:
        running = self._running
        if running is not None:
            self._finish(running.finish_reason or "cancelled")
            self._running = None
            ended = running.finish_reason in ("stop", "length")
            running.handle.put_outcome(running.outcome(self._plan) if ended else error)
        for handle in self._waiting:
            handle.put_outcome(error)
        self._waiting.clear()

    # plans

    def _start_plan(self, plan: Plan, done: Future[None]) -> None:
        if self._pending_plan is not None:
            self._pending_plan[1].set_exception(AutoPipeError("another plan was applied before this one was ready"))
        self._pending_plan = (plan, done)
        self._load_errors.clear()
        self._fleet.forgive(plan)
        if not self._changes_target(plan):
            self._fleet.start(plan)

    def _changes_target(self, plan: Plan) -> bool:
        return stage_keys(plan)[-1] != stage_keys(self._plan)[-1]

    def _settle_plan(self) -> None:
        """Put the pending plan in force once all it needs is loaded, or give it up."""
        if self._pending_plan is None:
            return
        plan, done = self._pending_plan
        keys = stage_keys(plan)
        failed = next((self._load_errors[key] for key in keys if key in self._load_errors), None)
        if failed is not None:
            self._pending_plan = None
            self._fleet.retire(set(stage_keys(self._plan)))
            done.set_exception(failed)
            return
        if self._changes_target(plan):
            if self._running is not None:
                return
            self._fleet.start(plan)
        if all(self._fleet.ready(key) for key in keys):
            self._pending_plan = None
            self._plan = plan
            self._target_facts = self._fleet.workers[keys[-1]].facts
            if self._running is not None:
                self._running.plan_changes += 1
            self._fleet.configure(plan)
            self._begin_on_workers()
            for worker in self._fleet.retire(set(keys)):
                if self._running is not None:
                    self._running.awaited.discard(worker.key)
            done.set_result(None)

    # workers

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
        kind, running = message["type"], self._running
        if kind == "ready":
            worker.facts, worker.state = message, WorkerState.READY
            if self._pending_plan is None:
                self._fleet.configure(self._plan)
                self._begin_on_workers()
        elif kind == "load-failed":
            self._load_errors[worker.key] = rebuild_error(message["error"], message["message"])
            self._lose(worker, f"it could not be loaded: {message['message']}")
        elif kind == "step-failed":
            self._lose(worker, f"{message['error']}: {message['message']}")
        elif kind == "outgrown":
            worker.outgrown = True
            self._note(f"stage {worker.name!r}: the text outgrew its context of {message['max_length']} tokens")
            self._fleet.configure(self._plan)
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
            running.handle.put_tokens(TokenBlock(message["ids"], message.get("logprobs")))
            if message["finish"] is not None:
                self._finish(message["finish"])
        elif kind == "process":
            self._process_row(worker, running.handle, message)

    def _process_row(self, worker: WorkerProcess, handle: RequestHandle, message: Message) -> None:
        row = worker.slot.logits(message["vocab"])
        try:
            if handle.processor is not None:
                row[:] = handle.processor(message["prefix"], row.copy())
        except Exception as error:  # the user's own code: the user gets the error back
            handle.put_outcome(error)
            self._finish("cancelled")
            return
        worker.send({"type": "processed"})

    def _watch(self) -> None:
        for worker in self._fleet.ended():
            self._hear(worker)
        if self._running is not None:
            for worker, trouble in self._fleet.troubled(self._plan):
                self._lose(worker, f"it was {trouble} and has been ended")

    def _lose(self, worker: WorkerProcess, why: str) -> None:
        """Go on without a worker."""
        if worker.state is WorkerState.DEAD:
            return
        self._fleet.end(worker)
        if not worker.facts:
            self._load_errors.setdefault(worker.key, ModelLoadError(f"stage {worker.name!r}: {why}"))
        else:
            self._note(f"stage {worker.name!r}: {why}")
        if self._running is not None:
            self._running.awaited.discard(worker.key)
        if worker.key == stage_keys(self._plan)[-1]:
            self._fail_all(self._load_errors.get(worker.key) or TargetDiedError(worker.name, why))
        else:
            self._fleet.configure(self._plan)

    def _note(self, text: str) -> None:
        _log.warning("%s", text)
        self._fallbacks.append(text)
        if self._running is not None:
            self._running.fallbacks.append(text)


def _weakly(method: weakref.WeakMethod[Callable[..., None]]) -> Callable[..., None]:
    """Calls a method of an object that may be gone by then."""

    def call(*arguments: object) -> None:
        alive = method()
        if alive is not None:
            with contextlib.suppress(EngineClosedError):
                alive(*arguments)

    return call


def _run(reference: weakref.ref[Engine]) -> None:
    """The engine's thread. It holds the engine only during a turn, so that an abandoned one can be collected."""
    while True:
        engine = reference()
        if engine is None:
            return
        try:
            if not engine._turn():
                return
        except Exception:  # a bug here must not leave callers waiting for ever
            _log.exception("the engine failed")
            engine._closed = True
        del engine
