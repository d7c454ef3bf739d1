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
import os
import queue
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from autopipe.core.board import MAX_SLOTS, Board, create_segment
from autopipe.core.chain import configure_chain, default_threads, neural_stages, stage_keys
from autopipe.core.channel import ChannelClosedError, Doorbell, Message
from autopipe.core.errors import (
    AutoPipeError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    ModelLoadError,
    StageError,
    TargetDiedError,
)
from autopipe.core.plan import Plan
from autopipe.core.processes import WorkerProcess, WorkerState, start_worker, stop_workers
from autopipe.core.request import Outcome, RequestHandle, RowProcessor, TokenBlock
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import RequestStats, StageStats, report_stages
from autopipe.core.trace import TraceEvent

_log = logging.getLogger(__name__)

_WATCH_S = 0.1
_TARGET_PATIENCE_S = 15.0
"""How much longer than a drafter the target may be silent: a late target is better than none."""
_MAX_RESTARTS = 3
_STATS_GRACE_S = 0.5
"""How long a finished request waits for the figures of a drafter that is still in a step."""


class _Running:
    """The request in the pipeline."""

    def __init__(self, handle: RequestHandle, plan: Plan) -> None:
        self.handle = handle
        self.finish_reason: str | None = None
        self.finished_s = 0.0
        self.awaited: set[str] = set()
        self.stats: dict[str, StageStats] = {}
        self.traces: dict[str, list[TraceEvent]] = {}
        self.fallbacks: list[str] = []
        self.plan = plan
        self.plan_changes = 0


class Engine:
    """A pipeline of stages in processes of their own.

    Args:
        plan: what to run. Its target is loaded before the constructor returns, its drafters too.
        load_timeout_s: seconds the models may take to load.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError: the plan cannot run; the message says why.
    """

    def __init__(self, plan: Plan, *, load_timeout_s: float = 600.0) -> None:
        self._plan = plan
        self._load_timeout_s = load_timeout_s
        self._descriptor = create_segment()
        self._board = Board(self._descriptor)
        self._bells = [Doorbell.create() for _ in range(MAX_SLOTS)]
        self._wake = Doorbell.create()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._workers: dict[str, WorkerProcess] = {}
        self._waiting: deque[RequestHandle] = deque()
        self._running: _Running | None = None
        self._pending_plan: tuple[Plan, Future[None]] | None = None
        self._leaving_slots: set[int] = set()
        self._restarts: dict[str, int] = {}
        self._load_errors: dict[str, AutoPipeError] = {}
        self._fallbacks: list[str] = []
        self._numbers = itertools.count(1)
        self._closed = False
        self._close_done = threading.Event()
        self._poller = select.poll()
        self._poller.register(self._wake.read_descriptor, select.POLLIN)
        self._by_descriptor: dict[int, WorkerProcess] = {}
        reference = weakref.ref(self)
        self._thread = threading.Thread(target=_run, args=(reference, self._wake), name="autopipe-engine", daemon=True)
        self._thread.start()
        self._exit_hook = lambda: _close_if_alive(reference)
        atexit.register(self._exit_hook)
        try:
            self.apply(plan, timeout_s=load_timeout_s)
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
        return {w.name: w.process.pid for w in list(self._workers.values()) if w.state is not WorkerState.DEAD}

    def facts(self, stage: str) -> Message:
        """What a stage said of itself when it was ready: vocab_size, max_length, exact, choice, load_s, step_ms."""
        return next((dict(w.facts) for w in list(self._workers.values()) if w.name == stage), {})

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
        handle = RequestHandle(
            next(self._numbers), list(prompt), params, eos, processor, trace, cancel_engine=self._cancel
        )
        self._check_request(handle)
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
            raise AutoPipeError(f"the plan was not in force after {seconds:g} s; its models are still loading") from None

    def close(self) -> None:
        """End all workers and fail what waits. May be called more than once."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._exit_hook)
            self._wake.ring()
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

    def _check_request(self, handle: RequestHandle) -> None:
        if not handle.prompt:
            raise ConfigError("prompt", handle.prompt, "at least one token")
        facts = self._target_facts
        bad = [token for token in handle.prompt if not 0 <= token < facts["vocab_size"]]
        if bad:
            raise ConfigError("prompt", bad[0], f"token ids from 0 to {facts['vocab_size'] - 1}")
        needed, limit = len(handle.prompt) + handle.params.max_new_tokens, facts["max_length"]
        if needed > limit:
            raise ContextLengthError(
                f"the prompt has {len(handle.prompt)} tokens and max_new_tokens is {handle.params.max_new_tokens}: "
                f"together {needed}, the target's context holds {limit}; shorten the prompt or lower max_new_tokens"
            )

    def _call(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake.ring()

    def _cancel(self, handle: RequestHandle) -> None:
        if not self._closed:
            self._call(lambda: self._cancel_now(handle))

    # -- the engine's thread --------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """One turn of the engine's loop; False when it is over."""
        if self._closed:
            self._shut_down()
            return False
        timeout_s = _WATCH_S if self._running or self._loading() else 1.0
        for descriptor, _ in self._poller.poll(timeout_s * 1e3):
            if descriptor == self._wake.read_descriptor:
                self._wake.silence()
            else:
                self._hear(self._by_descriptor.get(descriptor))
        while not self._commands.empty():
            self._commands.get()()
        self._watch()
        self._finish_if_done()
        self._settle_plan()
        self._start_next()
        return True

    def _loading(self) -> bool:
        return any(worker.state is WorkerState.LOADING for worker in self._workers.values())

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
        stop_workers(list(self._workers.values()))
        self._workers.clear()
        for bell in (*self._bells, self._wake):
            bell.close()
        os.close(self._descriptor)
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
        if self._pending_plan is not None and stage_keys(self._pending_plan[0])[-1] != stage_keys(self._plan)[-1]:
            return  # a new target is on its way
        self._revive()
        target = self._workers.get(stage_keys(self._plan)[-1])
        if target is None or target.state is not WorkerState.READY:
            return
        handle = self._waiting.popleft()
        try:
            self._check_request(handle)
        except AutoPipeError as error:
            handle.put_outcome(error)
            return
        handle.begun_s = time.monotonic()
        self._running = _Running(handle, self._plan)
        for worker in self._workers.values():
            worker.outgrown = False
        self._configure()
        self._begin_on_workers()

    def _begin_on_workers(self) -> None:
        """Tell every worker of the chain that has not heard of it about the request under way."""
        running = self._running
        if running is None or running.finish_reason is not None:
            return
        handle, keys = running.handle, stage_keys(self._plan)
        for place, key in enumerate(reversed(keys)):
            worker = self._workers.get(key)
            if worker is None or worker.state is not WorkerState.READY or worker.request == handle.id or worker.outgrown:
                continue
            worker.request = handle.id
            running.awaited.add(key)
            worker.send(
                {
                    "type": "begin",
                    "request": handle.id,
                    "stage": place,
                    "prompt": handle.prompt,
                    "params": handle.params.model_dump(mode="json"),
                    "eos": list(handle.eos_token_ids),
                    "vocab_size": self._target_facts["vocab_size"],
                    "verification": running.plan.verification.value,
                    "processor": handle.processor is not None,
                    "trace": handle.trace,
                }
            )

    def _finish(self, reason: str) -> None:
        running = self._running
        assert running is not None
        running.finish_reason, running.finished_s = reason, time.monotonic()
        for worker in self._workers.values():
            if worker.request == running.handle.id:
                worker.send({"type": "end", "request": running.handle.id})

    def _finish_if_done(self) -> None:
        running = self._running
        if running is None or running.finish_reason is None:
            return
        target = stage_keys(self._plan)[-1]
        patience_over = time.monotonic() - running.finished_s > _STATS_GRACE_S
        if running.awaited and not (patience_over and target not in running.awaited):
            return
        self._running = None
        running.handle.put_outcome(Outcome(running.finish_reason, self._summary(running), running.traces))

    def _summary(self, running: _Running) -> RequestStats:
        handle, keys = running.handle, stage_keys(self._plan)
        chain = [running.stats[key] for key in keys if key in running.stats]
        begun, end = handle.begun_s or handle.submitted_s, handle.last_token_s or running.finished_s
        first = handle.first_token_s
        lengths = running.stats[keys[-1]].acceptance_lengths if keys[-1] in running.stats else {}
        count = sum(lengths.values())
        after_first = handle.num_tokens - 1
        per_token: float | None = None
        if first is not None:
            per_token = 1e3 * ((end - first) / after_first if after_first > 0 else first - begun)
        return RequestStats(
            total_s=end - handle.submitted_s,
            queued_s=begun - handle.submitted_s,
            ttft_s=None if first is None else first - handle.submitted_s,
            ms_per_token=per_token,
            acceptance_length=sum(n * times for n, times in lengths.items()) / count if count else None,
            acceptance_histogram=dict(sorted(lengths.items())),
            stages=report_stages(chain, self._plan.chain[0].is_ngram) if chain else [],
            fallbacks=running.fallbacks,
            plan_changes=running.plan_changes,
        )

    # plans

    def _start_plan(self, plan: Plan, done: Future[None]) -> None:
        if self._pending_plan is not None:
            self._pending_plan[1].set_exception(AutoPipeError("another plan was applied before this one was ready"))
        self._pending_plan = (plan, done)
        self._load_errors.clear()
        keys = stage_keys(plan)
        for key in keys:
            self._restarts.pop(key, None)
        if self._target_changes(plan) and self._running is not None:
            return  # started by _settle_plan once the request under way is done
        self._spawn_missing(plan)

    def _target_changes(self, plan: Plan) -> bool:
        old = stage_keys(self._plan)[-1]
        return bool(self._workers) and old in self._workers and stage_keys(plan)[-1] != old

    def _spawn_missing(self, plan: Plan, only: set[str] | None = None) -> None:
        """Start the stages of `plan` (of these, `only` those named) that are not running."""
        names = [name for name, stage in zip(plan.names(), plan.chain, strict=True) if not stage.is_ngram]
        for key, name, stage in zip(stage_keys(plan), names, neural_stages(plan), strict=True):
            worker = self._workers.get(key)
            if worker is not None and worker.state is not WorkerState.DEAD:
                worker.name = name
                continue
            if only is not None and key not in only:
                continue
            taken = {other.slot.index for other in self._workers.values()} | self._leaving_slots
            free = next(index for index in range(MAX_SLOTS) if index not in taken)
            threads = stage.threads or default_threads(plan)
            started = start_worker(
                key, name, self._board.slot(free), free, self._descriptor, self._bells, threads
            )
            self._workers[key] = started
            self._by_descriptor[started.channel.fileno()] = started
            self._poller.register(started.channel.fileno(), select.POLLIN)
            started.send(
                {
                    "type": "load",
                    "stage": stage.model_dump(mode="json"),
                    "name": name,
                    "exact": plan.exact,
                    "threads": threads,
                    "cores": stage.cores,
                }
            )

    def _settle_plan(self) -> None:
        """Put the pending plan in force once all it needs is loaded, or give it up."""
        if self._pending_plan is None:
            return
        plan, done = self._pending_plan
        keys = stage_keys(plan)
        if self._target_changes(plan):
            if self._running is not None:
                return
            self._spawn_missing(plan)
        failed = next((self._load_errors[key] for key in keys if key in self._load_errors), None)
        if failed is not None:
            self._pending_plan = None
            self._retire(set(stage_keys(self._plan)) if self._plan is not plan else set())
            done.set_exception(failed)
            return
        if all(key in self._workers and self._workers[key].state is WorkerState.READY for key in keys):
            self._pending_plan = None
            self._plan = plan
            if self._running is not None:
                self._running.plan_changes += 1
            self._configure()
            self._begin_on_workers()
            self._retire(set(keys))
            done.set_result(None)

    def _retire(self, keep: set[str]) -> None:
        """Unload the stages that are not in `keep`."""
        leaving = [worker for key, worker in self._workers.items() if key not in keep]
        if self._running is not None:
            for worker in leaving:
                self._running.awaited.discard(worker.key)
        for worker in leaving:
            self._forget(worker)
        if not leaving:
            return
        slots = {worker.slot.index for worker in leaving}
        self._leaving_slots |= slots

        def stop() -> None:
            stop_workers(leaving)
            if not self._closed:
                self._call(lambda: self._leaving_slots.difference_update(slots))

        threading.Thread(target=stop, daemon=True).start()

    def _forget(self, worker: WorkerProcess) -> None:
        self._workers.pop(worker.key, None)
        descriptor = worker.channel.fileno()
        if descriptor >= 0 and self._by_descriptor.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)

    def _configure(self) -> None:
        """Tell every worker its place among those that can run."""
        able = {
            key: worker.slot.index
            for key, worker in self._workers.items()
            if worker.state is WorkerState.READY and not worker.outgrown
        }
        keys = stage_keys(self._plan)
        if keys[-1] not in able:
            return
        for key, config in configure_chain(self._plan, able).items():
            self._workers[key].send({"type": "configure", "config": config.model_dump(mode="json")})

    def _revive(self) -> None:
        """Start again what has died, a few times at most."""
        keys = stage_keys(self._plan)
        for key in keys:
            worker = self._workers.get(key)
            if worker is not None and worker.state is not WorkerState.DEAD:
                continue
            if key != keys[-1] and self._restarts.get(key, 0) >= _MAX_RESTARTS:
                continue
            self._restarts[key] = self._restarts.get(key, 0) + 1
            self._spawn_missing(self._plan, {key})

    # workers

    def _hear(self, worker: WorkerProcess | None) -> None:
        if worker is None:
            return
        try:
            while (message := worker.channel.receive()) is not None:
                self._obey(worker, message)
                if worker.state is WorkerState.DEAD:
                    return
        except ChannelClosedError:
            code = worker.process.poll()
            self._lose(worker, f"its process ended (exit code {code})" if code is not None else "its process ended")

    def _obey(self, worker: WorkerProcess, message: Message) -> None:
        kind = message["type"]
        running = self._running
        if kind == "ready":
            worker.facts, worker.state = message, WorkerState.READY
            if self._pending_plan is None:
                self._configure()
                self._begin_on_workers()
        elif kind == "load-failed":
            self._load_errors[worker.key] = _rebuild_error(message)
            self._lose(worker, f"it could not be loaded: {message['message']}")
        elif kind == "step-failed":
            self._lose(worker, f"{message['error']}: {message['message']}")
        elif kind == "outgrown":
            worker.outgrown = True
            self._note(f"stage {worker.name!r}: the text outgrew its context of {message['max_length']} tokens")
            self._configure()
        elif running is None or message.get("request") != running.handle.id:
            if kind == "ended" and worker.request == message["request"]:
                worker.request = None
        elif kind == "tokens":
            if running.finish_reason is None:
                running.handle.put_tokens(TokenBlock(message["ids"], message.get("logprobs")))
                if message["finish"] is not None:
                    self._finish(message["finish"])
        elif kind == "ended":
            worker.request = None
            running.awaited.discard(worker.key)
            running.stats[worker.key] = StageStats.from_message({**message["stats"], "name": worker.name})
            running.traces[worker.name] = [TraceEvent(*event) for event in message["trace"]]
        elif kind == "process":
            self._process_row(worker, running.handle, message)

    def _process_row(self, worker: WorkerProcess, handle: RequestHandle, message: Message) -> None:
        row = worker.slot.logits(message["vocab"])
        assert handle.processor is not None
        try:
            row[:] = handle.processor(message["prefix"], row.copy())
        except Exception as error:  # the user's own code: the user gets the error back
            handle.put_outcome(error)
            self._finish("cancelled")
            return
        worker.send({"type": "processed"})

    def _watch(self) -> None:
        now_ns = time.monotonic_ns()
        target = stage_keys(self._plan)[-1]
        for worker in list(self._workers.values()):
            if worker.state is WorkerState.DEAD:
                continue
            if worker.process.poll() is not None:
                self._hear(worker)
            if worker.state is WorkerState.DEAD or self._running is None:
                continue
            patience_s = _TARGET_PATIENCE_S if worker.key == target else 0.0
            trouble = worker.trouble(now_ns - int(1e9 * patience_s))
            if trouble:
                self._lose(worker, f"it was {trouble} and has been ended")

    def _lose(self, worker: WorkerProcess, why: str) -> None:
        """Go on without a worker."""
        if worker.state is WorkerState.DEAD:
            return
        self._forget(worker)
        worker.kill()
        error: Exception | None = self._load_errors.get(worker.key)
        is_target = worker.key == stage_keys(self._plan)[-1]
        if error is None and self._pending_plan and worker.key in stage_keys(self._pending_plan[0]) and not worker.facts:
            self._load_errors[worker.key] = ModelLoadError(f"stage {worker.name!r}: {why}")
        if worker.facts:
            self._note(f"stage {worker.name!r}: {why}")
        running = self._running
        if running is not None:
            running.awaited.discard(worker.key)
        if is_target:
            death = error if isinstance(error, AutoPipeError) else TargetDiedError(worker.name, why)
            self._fail_all(death)
        else:
            self._configure()

    def _fail_all(self, error: Exception) -> None:
        running = self._running
        if running is not None:
            self._running = None
            if running.finish_reason is not None and running.finish_reason != "cancelled":
                running.handle.put_outcome(Outcome(running.finish_reason, self._summary(running), running.traces))
            else:
                running.handle.put_outcome(error)
            for worker in self._workers.values():
                if worker.request == running.handle.id:
                    worker.send({"type": "end", "request": running.handle.id})
        for handle in self._waiting:
            handle.put_outcome(error)
        self._waiting.clear()

    def _note(self, text: str) -> None:
        _log.warning("%s; output is unchanged, speed may not be", text)
        self._fallbacks.append(text)
        if self._running is not None:
            self._running.fallbacks.append(text)

    @property
    def _target_facts(self) -> Message:
        worker = self._workers.get(stage_keys(self._plan)[-1])
        if worker is not None and worker.facts:
            self._last_target_facts = worker.facts
        return self._last_target_facts

    _last_target_facts: Message = {"vocab_size": 1 << 30, "max_length": 1 << 30}  # noqa: RUF012 - replaced, not mutated


def _rebuild_error(message: Message) -> AutoPipeError:
    """The worker's error as the same class here, where it is one of ours."""
    import autopipe.core.errors as errors

    kind: Any = getattr(errors, message["error"], None)
    if isinstance(kind, type) and issubclass(kind, AutoPipeError) and kind not in (ConfigError, StageError, TargetDiedError):
        return kind(message["message"])
    if message["error"] == "ConfigError":
        return AutoPipeError(message["message"])
    return ModelLoadError(f"{message['error']}: {message['message']}")


def _run(reference: weakref.ref[Engine], wake: Doorbell) -> None:
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


def _close_if_alive(reference: weakref.ref[Engine]) -> None:
    engine = reference()
    if engine is not None:
        with contextlib.suppress(Exception):
            engine.close()
