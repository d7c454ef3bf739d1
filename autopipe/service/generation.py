"""One choice of one request, from the engine's tokens to pieces of text, in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from autopipe.core.request import Outcome, RequestHandle, TokenBlock
from autopipe.core.sampling import SamplingParams
from autopipe.core.text import OutputText

ABORTED = "abort"
"""The finish_reason of what was cut short: by a shutdown, or because the client has gone."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What some tokens added. The last of a choice has a `finish_reason`."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class Timing:
    """When tokens came, in seconds of the monotonic clock.

    Attributes:
        gaps: (seconds since the tokens before, number of tokens), first tokens left out.
    """

    submitted_s: float
    first_s: float | None = None
    last_s: float | None = None
    gaps: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice that is over, for whoever counts.

    Attributes:
        outcome: what the engine said of it, or the error it failed with.
        finish_reason: what the client was told; None: an error.
        num_tokens: output tokens the client got.
    """

    request: int
    prompt_tokens: int
    num_tokens: int
    finish_reason: str | None
    timing: Timing
    outcome: Outcome | BaseException


class Listener(Protocol):
    """Who counts. Called from the loop's or the engine's thread: be quick."""

    def delivered(self, num_tokens: int) -> None:
        """A choice got tokens."""

    def ended(self, ended: Ended) -> None:
        """A choice is over; told once."""


class Choice:
    """Streams one choice; iterate over `deltas` once, or call `discard`.

    Args:
        listener: told of tokens and of the end.
    """

    def __init__(
        self,
        handle: RequestHandle,
        params: SamplingParams,
        tokenizer: Any,
        listener: Listener,
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._handle = handle
        self._output = OutputText(tokenizer, params.stop)
        self._listener = listener
        self._timing = Timing(handle.submitted_s)
        self._reported = False
        self._failure: BaseException | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self._handle.prompt)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Pieces as they come, those that wait joined; the last has the finish_reason.

        Closing the iterator cancels the request.

        Raises:
            AutoPipeError: the request failed.
        """
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ready.set)

        self._handle.listen(wake)
        try:
            while self.finish_reason is None:
                await ready.wait()
                ready.clear()
                delta = self._take()
                if delta is not None:
                    yield delta
                if self._failure is not None:
                    raise self._failure
        finally:
            self.discard()

    def discard(self) -> None:
        """Have the engine stop, if it has not; its last word is still reported."""
        if not self._reported:
            self._handle.cancel()
            self._handle.listen(self._await_outcome)

    def abort(self) -> None:
        """End early: the last delta says so."""
        self._handle.cancel()

    def _take(self) -> Delta | None:
        token_ids: list[int] = []
        logprobs: list[Any] = []
        has_logprobs, outcome = False, None
        for event in self._handle.take():
            if not isinstance(event, TokenBlock):
                outcome = event
                break
            token_ids += event.token_ids
            if event.logprobs is not None:
                has_logprobs = True
                logprobs += event.logprobs
        if not token_ids and outcome is None:
            return None
        text = ""
        if token_ids:
            self._note(len(token_ids))
            pushed = self._output.push(token_ids)
            text, token_ids = pushed.text, token_ids[: pushed.num_tokens_used]
            self.token_ids += token_ids
        if not self._output.stopped and isinstance(outcome, BaseException):
            self._tell(outcome)
            self._failure = outcome  # raised once the tokens that came before it are out
        if self._output.stopped or isinstance(outcome, Outcome):
            text += self._output.finish()
            reason = outcome.finish_reason if isinstance(outcome, Outcome) else "stop"
            self.finish_reason = "stop" if self._output.stopped else ABORTED if reason == "cancelled" else reason
        if outcome is not None:
            self._tell(outcome)
        return Delta(text, token_ids, logprobs[: len(token_ids)] if has_logprobs else None, self.finish_reason)

    def _note(self, num_tokens: int) -> None:
        timing, now = self._timing, time.monotonic()
        if timing.last_s is None:
            timing.first_s = now
        else:
            timing.gaps.append((now - timing.last_s, num_tokens))
        timing.last_s = now
        self._listener.delivered(num_tokens)

    def _await_outcome(self) -> None:
        for event in self._handle.take():
            if not isinstance(event, TokenBlock):
                self._tell(event)

    def _tell(self, outcome: Outcome | BaseException) -> None:
        if not self._reported:
            self._reported = True
            reason = self.finish_reason
            if reason is None and isinstance(outcome, Outcome):
                reason = ABORTED if outcome.finish_reason == "cancelled" else outcome.finish_reason
            self._listener.ended(
                Ended(self._handle.id, self.prompt_tokens, len(self.token_ids), reason, self._timing, outcome)
            )
