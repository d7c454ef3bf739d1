"""The shared engine: many requests on one target at once, in one process of its own.

A drop-in for `Engine` where the plan allows it (`reason_unshareable`): the same calls, the same handles, the same
text. One thread (`conductor.py`) passes requests to the worker and tokens back; callers put commands into its mailbox.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from autopipe.core.chain import neural_names, stage_keys
from autopipe.core.channel import Message
from autopipe.core.errors import AutoPipeError, ConfigError, EngineClosedError, QueueFullError
from autopipe.core.mailbox import Mailbox
from autopipe.core.plan import Plan
from autopipe.core.request import RequestHandle, RowProcessor, check_request
from autopipe.core.sampling import SamplingParams
from autopipe.core.shared.conductor import SharedConductor
from autopipe.core.shared.ledger import OpenRequest
from autopipe.core.shared.loading import require_shareable
from autopipe.core.shared.options import SharingOptions
from autopipe.core.stats import StageReport

_CLOSE_S = 10.0
"""How long `close` waits for the engine's thread."""


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """What is under way.

    Attributes:
        running: requests for which something has been computed. waiting: the others.
        progress: for each running one, by the id of its handle, what its stages have done so far.
    """

    running: int = 0
    waiting: int = 0
    progress: Mapping[int, list[StageReport]] = field(default_factory=dict)


class SharedEngine:
    """One target, many requests at a time.

    Args:
        plan: what to run; loaded before the constructor returns.
        options: how requests share it.
        preflight: called before anything loads, while the process is starting; what it raises is raised.
        load_timeout_s: seconds the model may take to load.

    Raises:
        ConfigError: the plan cannot be shared, or not run.
        ModelLoadError, UnsupportedModelError: the target cannot be loaded, or not for sharing.
    """

    continues = True
    """`submit` takes `output=`, to go on with a request that was cut off."""

    def __init__(
        self,
        plan: Plan,
        options: SharingOptions | None = None,
        *,
        preflight: Callable[[], None] = lambda: None,
        load_timeout_s: float = 600.0,
    ) -> None:
        require_shareable(plan)
        self.options = options or SharingOptions()
        self._load_timeout_s = load_timeout_s
        self._numbers = itertools.count(1)
        self._gate = threading.Lock()
        self._conductor = SharedConductor(plan, self.options, load_timeout_s)
        self._mailbox = self._conductor.mailbox
        self._thread = threading.Thread(target=self._conductor.run, name="autopipe-shared-engine", daemon=True)
        self._thread.start()
        # The thread does not hold the engine, so an abandoned engine is collected, and this closes it then or at exit.
        self._finalizer = weakref.finalize(self, _close, self._mailbox, self._thread)
        try:
            self._mailbox.post(lambda: self._conductor.keeper.spawn(plan))
            preflight()
            self._apply(plan, load_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._conductor.plan

    @property
    def fallbacks(self) -> list[str]:
        """What has not gone as planned so far, in words."""
        return list(self._conductor.fallbacks)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests so far."""
        return self._conductor.num_tokens

    @property
    def num_running(self) -> int:
        """Requests for which something has been computed."""
        return self._conductor.counts()[0]

    @property
    def num_waiting(self) -> int:
        """Requests for which nothing has been computed yet."""
        return self._conductor.counts()[1]

    @property
    def worker_ids(self) -> dict[str, int]:
        """Process id of the target's process by its name; {} while there is none."""
        worker = self._conductor.keeper.worker
        return {} if worker is None else {worker.name: worker.process.pid}

    @property
    def running(self) -> RequestHandle | None:
        """The request that has run longest; its counters may be read at any time, its tokens only by its owner."""
        return self._conductor.first_running()

    def load(self) -> SharedLoad:
        """How many requests run and wait, and how far each has come. Costs microseconds."""
        progress = self._conductor.progress()
        running, waiting = self._conductor.counts()
        return SharedLoad(running, waiting, progress)

    def progress(self) -> tuple[int, list[StageReport]] | None:
        """The request that has run longest, by its handle's id, and what its stages have done; None between requests.

        All of them: `load`.
        """
        return next(iter(self._conductor.progress().items()), None)

    def step_s(self, num_rows: int) -> float | None:
        """Seconds of the target's step with so many rows, as measured lately; None before anything was."""
        costs = self._conductor.costs
        return None if costs is None else costs.seconds(num_rows)

    def cache_stats(self) -> dict[str, int]:
        """Prefix cache and KV memory, as of the last step: hits, reused (tokens), evictions, sequences, preemptions,
        kv_bytes."""
        return dict(self._conductor.cache)

    def facts(self, stage: str) -> Message:
        """What the target said when it was ready: vocab_size, max_length, exact, choice, load_s, step_ms; {} before."""
        return dict(self._conductor.target_facts) if stage == neural_names(self.plan)[-1] else {}

    def keep_loaded(self, plans: Sequence[Plan]) -> None:
        """Nothing to do: plans that can be shared differ in no loaded model."""

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """Check a request as `submit` does; return the prompt as a list of ints.

        Raises:
            ConfigError, ContextLengthError: as `submit`.
        """
        return check_request(prompt, params, self._conductor.target_facts)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
        processor: RowProcessor | None = None,
        trace: bool = False,
        output: Sequence[int] = (),
    ) -> RequestHandle:
        """Queue a request.

        Args:
            eos_token_ids: the model's own; `params.eos_token_ids` overrides them.
            processor: changes the target's logits at each verified position; runs in the engine's thread, and holds up
                all requests while it does.
            output: tokens this request was given before (by another engine, say, that has died): it goes on after
                them as if it had never stopped. Only new tokens are streamed.

        Raises:
            ConfigError: an empty prompt, a token id outside the vocabulary, or an output that is complete already.
            ContextLengthError: prompt and max_new_tokens do not fit the target's context.
            QueueFullError: as many requests as allowed wait already.
            EngineClosedError: the engine is closed.
        """
        self._mailbox.check_open()
        eos = tuple(map(int, eos_token_ids)) if params.eos_token_ids is None else params.eos_token_ids
        ids = self.check_request(prompt, params)
        given = self._checked_output(output, params, eos)
        with self._gate:
            self._check_room()
            handle = RequestHandle(next(self._numbers), ids, params, eos, processor, trace, self._cancel)
            self._conductor.admit(OpenRequest(handle, given, self._conductor.new_stats()))
        return handle

    def _checked_output(self, output: Sequence[int], params: SamplingParams, eos: Sequence[int]) -> list[int]:
        given = list(map(int, output))
        vocab_size = self._conductor.target_facts["vocab_size"]
        if any(not 0 <= token < vocab_size for token in given):
            raise ConfigError("output", "a token id out of range", f"token ids from 0 to {vocab_size - 1}")
        if len(given) >= params.max_new_tokens or (given and given[-1] in eos):
            raise ConfigError("output", f"{len(given)} tokens", "an output that has not ended")
        return given

    def _check_room(self) -> None:
        running, waiting = self._conductor.counts()
        idle_places = max(0, self.options.max_active - running)
        if waiting >= self.options.max_waiting + idle_places:
            raise QueueFullError(waiting, self._conductor.finishing.seconds_until(waiting - idle_places + 1))

    def apply(self, plan: Plan, timeout_s: float | None = None) -> None:
        """Put a plan with the same target in force; also while requests run, whose output it does not change.

        Raises:
            ConfigError: a plan that cannot be shared, or one with another target: make a new engine for it.
            AutoPipeError: the target is being loaded again, and takes too long.
        """
        require_shareable(plan)
        if stage_keys(plan)[-1] != stage_keys(self.plan)[-1]:
            raise ConfigError("chain", plan.target.model, f"plans with this target: {self.plan.target.model}")
        self._apply(plan, self._load_timeout_s if timeout_s is None else timeout_s)

    def _apply(self, plan: Plan, timeout_s: float) -> None:
        self._mailbox.check_open()
        if threading.current_thread() is self._thread:
            raise AutoPipeError("apply cannot be called from a logits processor: it would wait for itself")
        done: Future[None] = Future()
        self._mailbox.post(lambda: self._conductor.start_plan(plan, done))
        try:
            done.result(timeout_s)
        except TimeoutError:
            self._mailbox.post(lambda: self._conductor.withdraw_plan(done))
            raise AutoPipeError(f"the plan is not in force after {timeout_s:g} s: its target is loading") from None

    def save_ngrams(self, path: str | Path, timeout_s: float = 30.0) -> int:
        """Write what the n-gram drafter learned online (`ngram.online`) as a table for `ngram.table`.

        Returns:
            The number of contexts written.

        Raises:
            AutoPipeError: the plan in force does not learn online, the file cannot be written, or no answer came.
        """
        done: Future[int] = Future()
        target = str(Path(path).absolute())
        self._mailbox.post(lambda: self._conductor.save_ngrams(target, done))
        try:
            return done.result(timeout_s)
        except TimeoutError:
            raise AutoPipeError(f"the target's process has not answered for {timeout_s:g} s") from None

    def close(self) -> None:
        """End the worker and fail what is not finished. May be called more than once."""
        self._finalizer()

    def __enter__(self) -> SharedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cancel(self, handle: RequestHandle) -> None:
        with contextlib.suppress(EngineClosedError):
            self._mailbox.post(lambda: self._conductor.cancel(handle))


def _close(mailbox: Mailbox, thread: threading.Thread) -> None:
    if mailbox.forked:
        return  # the worker is the original's
    mailbox.close()
    if threading.current_thread() is not thread:
        thread.join(_CLOSE_S)
