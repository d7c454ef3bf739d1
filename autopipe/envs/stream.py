"""One background stream of generation on a live engine: request after request, timed block by block."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopipe.core.engine import Engine
from autopipe.core.errors import AutoPipeError
from autopipe.core.request import RequestHandle
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import RequestStats
from autopipe.envs.prompt_kinds import PromptKind

_log = logging.getLogger(__name__)

_STOP_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """What the stream is to generate next."""

    token_ids: tuple[int, ...]
    kind: PromptKind
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens that the target emitted in one step.

    Attributes:
        time_s: when, `time.monotonic()`.
        since_s: seconds after the block before it; of a request's first block, after its submission.
        position: output tokens of the request so far, this block included.
    """

    request: LiveRequest
    number: int
    time_s: float
    since_s: float
    num_tokens: int
    position: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request is over; `stats` are of the whole of it. `id` is the engine's number of it, `number` the stream's."""

    id: int
    number: int
    stats: RequestStats


class GenerationStream:
    """Generates in a thread of its own until the requests run out, an error ends it, or `stop`.

    It never waits for whoever reads it in the middle of a request; between requests it does, while more than
    `most_ahead` tokens have not been taken and nobody waits for more.

    Args:
        requests: drawn from in the stream's thread.
        eos_token_ids: the model's own.

    Attributes:
        num_ahead: tokens that have come and not been taken.
        finished: all requests are done.
        error: what ended the stream early.
    """

    def __init__(
        self, engine: Engine, requests: Iterator[LiveRequest], eos_token_ids: tuple[int, ...], most_ahead: int
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._eos_token_ids = eos_token_ids
        self._most_ahead = most_ahead
        self._changed = threading.Condition()
        self._items: deque[Block | RequestEnd] = deque()
        self.num_ahead = 0
        self._wanted = 0
        self._handle: RequestHandle | None = None
        self._stopping = False
        self.finished = False
        self.error: AutoPipeError | None = None
        self._thread = threading.Thread(target=self._run, name="autopipe-stream", daemon=True)
        self._thread.start()

    def take(self, num_tokens: int, timeout_s: float, *, from_now: bool = False) -> list[Block | RequestEnd]:
        """Wait for at least `num_tokens` tokens, or the end; return all that has come since the last time.

        Args:
            from_now: tokens that are there already do not count.

        Raises:
            AutoPipeError: nothing came for `timeout_s` seconds.
        """
        with self._changed:
            if from_now:
                num_tokens += self.num_ahead
            self._wanted = num_tokens
            self._changed.notify_all()
            while self.num_ahead < num_tokens and not self._over():
                before = self.num_ahead
                moved = self._changed.wait_for(lambda: self.num_ahead > before or self._over(), timeout_s)  # noqa: B023 - called before the loop goes on
                if not moved:
                    raise AutoPipeError(f"the live engine has not produced a token for {timeout_s:g} s")
            items = list(self._items)
            self._items.clear()
            self.num_ahead = 0
            self._changed.notify_all()
        return items

    def stop(self) -> None:
        """Cancel the request under way and end the thread."""
        with self._changed:
            self._stopping = True
            handle = self._handle
            self._changed.notify_all()
        if handle is not None:
            handle.cancel()
        self._thread.join(_STOP_WAIT_S)
        if self._thread.is_alive():
            _log.warning("the stream of requests did not end within %g s", _STOP_WAIT_S)

    def _room(self) -> int:
        """Tokens up to which the stream may be ahead of its reader."""
        return max(self._most_ahead, self._wanted)

    def _over(self) -> bool:
        return self.finished or self.error is not None

    def _run(self) -> None:
        try:
            for number, request in enumerate(self._requests):
                with self._changed:
                    self._changed.wait_for(lambda: self.num_ahead < self._room() or self._stopping)
                    if self._stopping:
                        return
                    self._handle = handle = self._engine.submit(
                        request.token_ids, request.params, eos_token_ids=self._eos_token_ids
                    )
                self._generate(number, request, handle)
            self._say(lambda: setattr(self, "finished", True))
        except AutoPipeError as error:
            failure = error
            self._say(lambda: setattr(self, "error", failure))

    def _generate(self, number: int, request: LiveRequest, handle: RequestHandle) -> None:
        last_s, position = handle.submitted_s, 0
        for block in handle:
            now_s, count = time.monotonic(), len(block.token_ids)
            position += count
            item = Block(request, number, now_s, now_s - last_s, count, position, position == count)
            last_s = now_s
            self._put(item, count)
        if not self._stopping:
            self._put(RequestEnd(handle.id, number, handle.outcome().stats), 0)

    def _put(self, item: Block | RequestEnd, num_tokens: int) -> None:
        with self._changed:
            self._items.append(item)
            self.num_ahead += num_tokens
            self._changed.notify_all()

    def _say(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
