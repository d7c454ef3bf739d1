"""The callers' side that both engines have in common: a thread that does everything, and ways to ask it to."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

from autopipe.core.conductor_base import ConductorBase
from autopipe.core.errors import AutoPipeError, EngineClosedError
from autopipe.core.mailbox import Mailbox
from autopipe.core.plan import Plan
from autopipe.core.request import RequestHandle, check_request
from autopipe.core.sampling import SamplingParams

_CLOSE_S = 10.0
"""How long `close` waits for the engine's thread."""


Conductor = TypeVar("Conductor", bound=ConductorBase)


class EngineBase(Generic[Conductor]):
    """An engine whose thread is run by a conductor.

    Args:
        start: begins to start processes; runs in the engine's thread.
        preflight: called meanwhile; what it raises is raised.
        load_timeout_s: seconds the models may take to load.
    """

    def __init__(
        self,
        conductor: Conductor,
        *,
        start: Callable[[], None],
        preflight: Callable[[], None],
        load_timeout_s: float,
    ) -> None:
        self._conductor = conductor
        self._mailbox = conductor.mailbox
        self._load_timeout_s = load_timeout_s
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=conductor.run, name="autopipe-engine", daemon=True)
        self._thread.start()
        # The thread does not hold the engine, so an abandoned engine is collected, and this closes it then or at exit.
        self._finalizer = weakref.finalize(self, _close, self._mailbox, self._thread)
        try:
            self._mailbox.post(start)
            preflight()
            self._apply(conductor.plan, load_timeout_s)
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
    def closed(self) -> bool:
        """Whether it takes no requests any more."""
        return self._mailbox.closed

    @property
    def recent(self) -> list[RequestHandle]:
        """The requests begun last, oldest first, ended ones too, so that who looks now and then misses none."""
        return list(self._conductor.recent)

    def load_factor(self) -> float:
        """Seconds of plain decoding's step now, relative to a step with one request."""
        return 1.0

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """Check a request as `submit` does; return the prompt as a list of ints.

        Raises:
            ConfigError, ContextLengthError: as `submit`.
        """
        return check_request(prompt, params, self._conductor.target_facts)

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
            raise AutoPipeError(f"the stage that learns online has not answered for {timeout_s:g} s") from None

    def close(self) -> None:
        """End all workers and fail what is not finished. May be called more than once."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _apply(self, plan: Plan, timeout_s: float) -> None:
        """Put a plan in force and wait until it is."""
        self._mailbox.check_open()
        if threading.current_thread() is self._thread:
            raise AutoPipeError("apply cannot be called from a logits processor: it would wait for itself")
        done: Future[None] = Future()
        self._mailbox.post(lambda: self._conductor.start_plan(plan, done))
        try:
            done.result(timeout_s)
        except TimeoutError:
            self._mailbox.post(lambda: self._conductor.withdraw_plan(done))
            raise AutoPipeError(f"the plan is not in force after {timeout_s:g} s: its models are loading") from None

    def _cancel(self, handle: RequestHandle) -> None:
        with contextlib.suppress(EngineClosedError):
            self._mailbox.post(lambda: self._conductor.cancel(handle))


def _close(mailbox: Mailbox, thread: threading.Thread) -> None:
    if mailbox.forked:
        return  # the workers are the original's
    mailbox.close()
    if threading.current_thread() is not thread:
        thread.join(_CLOSE_S)
