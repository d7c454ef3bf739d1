"""A request as its caller holds it: a stream of token blocks, then an outcome."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from autopipe.core.errors import RequestCancelledError
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import RequestStats
from autopipe.core.trace import TraceEvent

RowProcessor = Callable[[list[int], npt.NDArray[np.float32]], npt.NDArray[np.float32]]
"""(prefix token ids, logits float32 [vocab]) -> logits float32 [vocab]."""


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """Final tokens, in order. `logprobs`, where asked for, has one entry per token."""

    token_ids: list[int]
    logprobs: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: `finish_reason` is stop, length or cancelled."""

    finish_reason: str
    stats: RequestStats
    trace: dict[str, list[TraceEvent]]


@dataclass(eq=False)
class RequestHandle:
    """Iterate over it for token blocks; afterwards `outcome()`.

    Safe to use from any one thread; `cancel` from any thread, any number of times.
    """

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    processor: RowProcessor | None
    trace: bool
    cancel_engine: Callable[[RequestHandle], None]
    submitted_s: float = field(default_factory=time.monotonic)
    begun_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0
    cancelled: bool = False
    _events: queue.SimpleQueue[TokenBlock | Outcome | BaseException] = field(default_factory=queue.SimpleQueue)
    _outcome: Outcome | BaseException | None = None

    def __iter__(self) -> Iterator[TokenBlock]:
        """Blocks as they come.

        Raises:
            TargetDiedError, StageError, EngineClosedError: the request cannot be finished.
        """
        while self._outcome is None:
            event = self._events.get()
            if isinstance(event, TokenBlock):
                yield event
            else:
                self._outcome = event
        if isinstance(self._outcome, BaseException):
            raise self._outcome

    def outcome(self) -> Outcome:
        """Wait for the end; blocks not yet taken are dropped. Raises what iterating raises."""
        for _ in self:
            continue
        if not isinstance(self._outcome, Outcome):
            raise RequestCancelledError("the request has no outcome")
        return self._outcome

    def cancel(self) -> None:
        """Stop as soon as the step under way is done. The outcome's reason is `cancelled`, unless it had ended."""
        self.cancelled = True
        self.cancel_engine(self)

    # -- the engine's side ----------------------------------------------------------------------------------

    def put_tokens(self, block: TokenBlock) -> None:
        now = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now
        self.last_token_s = now
        self.num_tokens += len(block.token_ids)
        self._events.put(block)

    def put_outcome(self, outcome: Outcome | BaseException) -> None:
        self._events.put(outcome)
