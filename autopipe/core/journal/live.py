"""A journaled request under way: what it gets goes to the journal and to everybody who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from autopipe.core.errors import AutoPipeError, EngineClosedError
from autopipe.core.journal.record import Record, Status
from autopipe.core.journal.writer import JournalWriter
from autopipe.core.request import Outcome, RequestHandle, TokenBlock
from autopipe.core.stats import RequestStats


class LiveRequest:
    """Passes an engine's tokens on to any number of handles; a handle that comes late gets all of them.

    Args:
        record: what is persisted; its token_ids are what has been given out before.
        detached: go on although nobody waits.
        forget: called when the request is over.
    """

    def __init__(
        self, record: Record, writer: JournalWriter, *, detached: bool, forget: Callable[[LiveRequest], None]
    ) -> None:
        self.record = record
        self._writer = writer
        self._detached = detached
        self._forget = forget
        self._gate = threading.RLock()
        self._tokens = list(record.token_ids)
        self._logprobs: list[Any] | None = None if record.params.num_logprobs is None else []
        self._position = 0  # in the output, of the engine's next token
        self._inner: RequestHandle | None = None
        self._followers: list[RequestHandle] = []
        self._ended: Outcome | BaseException | None = None

    def attach(self, inner: RequestHandle, position: int) -> None:
        """Listen to the engine's handle, whose first token is the output's at `position`."""
        self._inner, self._position = inner, position
        inner.listen(self._take)

    def follow(self) -> RequestHandle:
        """A handle that gets the whole output."""
        record = self.record
        with self._gate:
            number = 0 if self._inner is None else self._inner.id
            handle = RequestHandle(number, record.prompt, record.params, record.eos_token_ids, None, False, self._leave)
            if self._inner is not None:
                handle.begun_s = self._inner.begun_s
            if self._tokens:
                handle.put_tokens(TokenBlock(list(self._tokens), self._logprobs and list(self._logprobs)))
            if self._ended is None:
                self._followers.append(handle)
            else:
                handle.put_outcome(self._ended)
        return handle

    def _take(self) -> None:
        with self._gate:
            if self._inner is None:
                return
            for event in self._inner.take():
                if isinstance(event, TokenBlock):
                    self._take_tokens(event)
                else:
                    self._end(event)

    def _take_tokens(self, block: TokenBlock) -> None:
        known = len(self._tokens) - self._position  # computed again after a crash, by an engine that cannot continue
        self._position += len(block.token_ids)
        new = block.token_ids[max(0, known) :]
        if not new:
            return
        self._writer.append(self.record.key, len(self._tokens), new)
        self._tokens += new
        logprobs = None if block.logprobs is None else block.logprobs[max(0, known) :]
        if self._logprobs is not None:
            self._logprobs += logprobs or []
        for handle in self._followers:
            if handle.begun_s is None and self._inner is not None:
                handle.begun_s = self._inner.begun_s
            handle.put_tokens(TokenBlock(new, logprobs))

    def _end(self, event: Outcome | BaseException) -> None:
        self._ended = event
        key = self.record.key
        if isinstance(event, Outcome):
            status = Status.CANCELLED if event.finish_reason == "cancelled" else Status.FINISHED
            self._writer.set_status(key, status, event.finish_reason)
        elif not isinstance(event, EngineClosedError):  # after which it still counts as running: the next start goes on
            self._writer.set_status(key, Status.FAILED, _describe(event))
        followers, self._followers = self._followers, []
        self._forget(self)
        for handle in followers:
            handle.put_outcome(event)

    def _leave(self, handle: RequestHandle) -> None:
        """Somebody waits no more; the last one to go ends the request."""
        with self._gate:
            if handle not in self._followers:
                return
            if len(self._followers) == 1 and not self._detached and self._inner is not None:
                self._inner.cancel()
                return
            self._followers.remove(handle)
        handle.put_outcome(Outcome("cancelled", RequestStats(), {}))


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, AutoPipeError) else type(error).__name__
