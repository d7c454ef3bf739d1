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
import operator
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from autopipe.core.chain import neural_names, stage_keys
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
from autopipe.core.stats import NGRAM, RequestStats, StageReport, StageStats, report_stages
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
        self._gate = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
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

    def progress(self) -> tuple[int, list[StageReport]] | None:
        """The request under way, by its handle's id, and what its stages have done so far; None between requests.

        Costs microseconds and disturbs nobody. Figures that only the end of a request shows (waiting_s, overhead_s,
        bytes_out) are 0.
        """
        running, plan = self._running, self._plan
        if running is None:
            return None
        chain: list[StageStats] = []
        for key, upstream in zip(stage_keys(plan), ["", *neural_names(plan)], strict=False):
            worker = self._fleet.workers.get(key)
            done = None if worker is None else progress_stats(worker, running.handle.id)
            if done is not None:
                producer = upstream or (NGRAM if plan.chain[0].is_ngram else "")
                if done.verified:
                    done.count_drafts(producer, done.verified, done.accepted)
                chain.append(done)
        return running.handle.id, report_stages(chain)

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
        eos = tuple(map(int, eos_token_ids)) if params.eos_token_ids is None else params.eos_token_ids
        ids = self.check_request(prompt, params)
        handle = RequestHandle(next(self._numbers), ids, params, eos, processor, trace, self._cancel)
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
        if threading.current_thread() is self._thread:
            raise AutoPipeError("apply cannot be called from a logits processor: it would wait for itself")
        done: Future[None] = Future()
        self._call(lambda: self._start_plan(plan, done))
        seconds = timeout_s if timeout_s is not None else self._load_timeout_s
        try:
            done.result(seconds)
        except TimeoutError:
            self._call(lambda: self._withdraw_plan(done))
            raise AutoPipeError(f"the plan is not in force after {seconds:g} s: its models are loading") from None

    def close(self) -> None:
        """End all workers and fail what waits. May be called more than once."""
        if os.getpid() != self._owner:
            return  # a forked copy: the workers are the original's
        with self._gate:
            if not self._closed:
                self._closed = True
                atexit.unregister(self._exit_hook)
                self._fleet.wake.ring()
        if threading.current_thread() is not self._thread:
            self._close_done.wait(10)
            self._thread.join(10)

    def __del__(self) -> None:
        if os.getpid() == self._owner and not self._close_done.is_set():
            self._shut_down()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if os.getpid() != self._owner:
            raise EngineClosedError("this process is a fork of the engine's: make an engine of its own here")
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new one")

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """Check a request as `submit` does; return the prompt as a list of ints.

        Raises:
            ConfigError, ContextLengthError: as `submit`.
        """
        if not len(prompt):
            raise ConfigError("prompt", list(prompt), "at least one token")
        vocab_size, limit = self._target_facts["vocab_size"], self._target_facts["max_length"]
        ids = [_as_token_id(token) for token in prompt]
        bad = next((token for token in ids if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ConfigError("prompt", bad, f"token ids from 0 to {vocab_size - 1}")
        biased = next((token for token in params.logit_bias if not 0 <= token < vocab_size), None)
        if biased is not None:
            raise ConfigError("logit_bias", biased, f"token ids from 0 to {vocab_size - 1}")
        needed = len(ids) + params.max_new_tokens
        if needed > limit:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens and max_new_tokens is {params.max_new_tokens}: together "
                f"{needed}, the target's context holds {limit}; shorten the prompt or lower max_new_tokens"
            )
        return ids

    def _call(self, command: Callable[[], None]) -> None:
        """Have the engine's thread do something. Raises EngineClosedError when there is no thread any more."""
        with self._gate:
            self._check_open()
            self._commands.put(command)
            self._fleet.wake.ring()

    def _cancel(self, handle: RequestHandle) -> None:
        with contextlib.suppress(EngineClosedError):
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
        with self._gate:
            self._closed = True
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
            self._pending_plan = None
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
            self.check_request(handle.prompt, handle.params)
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
            self._give_plan_up(AutoPipeError("another plan was applied before this one was ready"))
        if self._closed:
            done.set_exception(EngineClosedError("the engine was closed"))
            return
        self._pending_plan = (plan, done)
        self._load_errors.clear()
        self._fleet.forgive(plan)
        self._retire({*stage_keys(self._plan), *stage_keys(plan)})
        if not self._changes_target(plan):
            self._start_stages(plan)

    def _start_stages(self, plan: Plan) -> None:
        try:
            self._fleet.start(plan)
        except (AutoPipeError, OSError) as error:
            self._give_plan_up(error if isinstance(error, AutoPipeError) else AutoPipeError(f"no new process: {error}"))

    def _give_plan_up(self, error: Exception) -> None:
        """Go back to the plan in force."""
        if self._pending_plan is not None:
            done = self._pending_plan[1]
            self._pending_plan = None
            self._retire(set(stage_keys(self._plan)))
            done.set_exception(error)

    def _withdraw_plan(self, done: Future[None]) -> None:
        if self._pending_plan is not None and self._pending_plan[1] is done:
            self._give_plan_up(AutoPipeError("withdrawn"))

    def _retire(self, keep: set[str]) -> None:
        """Unload the stages that are not in `keep`, remembering what they did for the request under way."""
        for worker in self._fleet.retire(keep):
            self._part_with(worker)

    def _part_with(self, worker: WorkerProcess) -> None:
        """Take a leaving stage's figures so far."""
        running = self._running
        if running is None:
            return
        running.awaited.discard(worker.key)
        so_far = progress_stats(worker, running.handle.id)
        if so_far is not None and worker.key not in running.stats:
            running.gone.append(so_far)

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
            self._give_plan_up(failed)
            return
        if self._changes_target(plan):
            if self._running is not None:
                return
            self._start_stages(plan)
        if all(self._fleet.ready(key) for key in keys):
            self._pending_plan = None
            self._plan = plan
            self._target_facts = self._fleet.workers[keys[-1]].facts
            if self._running is not None:
                self._running.plan_changes += 1
            self._fleet.configure(plan)
            self._begin_on_workers()
            self._retire(set(keys))
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
            self._load_errors.pop(worker.key, None)
            if self._pending_plan is None:
                self._fleet.configure(self._plan)
                self._begin_on_workers()
        elif kind == "load-failed":
            self._load_errors[worker.key] = rebuild_error(message["error"], message["message"])
            self._lose(worker, f"it could not be loaded: {message['message']}")
        elif kind == "step-failed":
            self._lose(worker, f"{message['error']}: {message['message']}")
        elif kind == "outgrown":
            if running is None or message["request"] != running.handle.id:
                return
            worker.outgrown = True
            self._note(f"stage {worker.name!r}: the text outgrew its context of {message['max_length']} tokens")
            self._fleet.configure(self._plan)
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
            running.handle.put_tokens(TokenBlock(message["ids"], message.get("logprobs")))
            if message["finish"] is not None:
                self._finish(message["finish"])
        elif kind == "process":
            self._process_row(worker, running.handle, message)
        elif kind == "request-failed":
            self._request_failed(worker, rebuild_error(message["error"], message["message"]))

    def _request_failed(self, worker: WorkerProcess, error: AutoPipeError) -> None:
        """A stage could choose no token: without its target the request is lost, without a drafter only slower."""
        if self._running is not None and worker.key == stage_keys(self._plan)[-1]:
            self._running.handle.put_outcome(error)
            self._finish("cancelled")
        else:
            worker.outgrown = True
            self._note(f"stage {worker.name!r} left the request: {error}")
            self._fleet.configure(self._plan)

    def _process_row(self, worker: WorkerProcess, handle: RequestHandle, message: Message) -> None:
        row = worker.slot.logits(message["vocab"])
        try:
            if handle.processor is not None:
                processed = np.asarray(handle.processor(message["prefix"], row.copy()))
                if processed.shape != row.shape:
                    raise ConfigError("logits_processor", processed.shape, f"scores of shape {row.shape}")
                row[:] = processed
        except BaseException as error:  # the user's own code, whatever it raises: the user gets it back
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
        self._part_with(worker)
        self._fleet.end(worker)
        pending = self._pending_plan is not None and worker.key in stage_keys(self._pending_plan[0])
        if pending or not worker.facts:
            self._load_errors.setdefault(worker.key, ModelLoadError(f"stage {worker.name!r}: {why}"))
        if not pending:
            self._note(f"stage {worker.name!r}: {why}")
        if worker.key == stage_keys(self._plan)[-1]:
            self._fail_all(self._load_errors.get(worker.key) or TargetDiedError(worker.name, why))
        else:
            self._fleet.configure(self._plan)

    def _note(self, text: str) -> None:
        if text not in self._fallbacks:
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
        except BaseException:  # whatever it is, it must not leave callers waiting for ever
            _log.exception("the engine failed")
            engine._shut_down()
            return
        del engine


def _as_token_id(token: object) -> int:
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError("prompt", token, "token ids: whole numbers") from None


def progress_stats(worker: WorkerProcess, request: int) -> StageStats | None:
    """What a stage has done so far in a request, as it shows it on the board; None before its first step."""
    done = worker.slot.read_progress(request)
    if done is None:
        return None
    return StageStats(
        name=worker.name,
        forwards=done.forwards,
        emitted=done.emitted,
        verified=done.verified,
        accepted=done.accepted,
        rollbacks=done.rollbacks,
        busy_s=done.busy_ns / 1e9,
        catch_up_s=done.catch_up_ns / 1e9,
    )
