"""A request as its caller holds it: a stream of token blocks, then an outcome."""

from __future__ import annotations

import contextlib
import operator
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from autopipe.core.chain import stage_keys
from autopipe.core.errors import ConfigError, ContextLengthError, RequestCancelledError
from autopipe.core.plan import Plan, Verification
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import RequestStats, StageStats, report_stages
from autopipe.core.trace import TraceEvent

STATS_GRACE_S = 0.5
"""How long a finished request waits for the figures of a drafter that is still in a step."""

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


def check_request(prompt: Sequence[int], params: SamplingParams, target_facts: Mapping[str, Any]) -> list[int]:
    """Check a request against the target's vocabulary and context; return the prompt as a list of ints.

    Args:
        target_facts: vocab_size and max_length of the target.

    Raises:
        ConfigError: an empty prompt or a token id outside the vocabulary.
        ContextLengthError: prompt and max_new_tokens do not fit the context.
    """
    if not len(prompt):
        raise ConfigError("prompt", list(prompt), "at least one token")
    vocab_size, limit = target_facts["vocab_size"], target_facts["max_length"]
    ids = [_as_token_id(token) for token in prompt]
    for key, tokens in (("prompt", ids), ("logit_bias", params.logit_bias)):
        bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ConfigError(key, bad, f"token ids from 0 to {vocab_size - 1}")
    needed = len(ids) + params.max_new_tokens
    if needed > limit:
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens and max_new_tokens is {params.max_new_tokens}: together "
            f"{needed}, the target's context holds {limit}; shorten the prompt or lower max_new_tokens"
        )
    return ids


def _as_token_id(token: object) -> int:
    try:
        return operator.index(token)  # type: ignore[arg-type]  # what has no index is refused
    except TypeError:
        raise ConfigError("prompt", token, "token ids: whole numbers") from None


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
    ended: bool = False
    _events: queue.SimpleQueue[TokenBlock | Outcome | BaseException] = field(default_factory=queue.SimpleQueue)
    _outcome: Outcome | BaseException | None = None
    _listener: Callable[[], None] | None = None

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

    def listen(self, callback: Callable[[], None]) -> None:
        """Have `callback` called at once and whenever `take` has something, from the engine's thread: be quick."""
        self._listener = callback
        callback()

    def take(self) -> list[TokenBlock | Outcome | BaseException]:
        """What has come since the last call, without waiting; the last of all is an Outcome or an error.

        For event loops. Use either this or iteration.
        """
        events: list[TokenBlock | Outcome | BaseException] = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

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
        self._put(block)

    def put_outcome(self, outcome: Outcome | BaseException) -> None:
        self.ended = True
        self._put(outcome)

    def _put(self, event: TokenBlock | Outcome | BaseException) -> None:
        self._events.put(event)
        if self._listener is not None:
            self._listener()


@dataclass(eq=False, slots=True)
class RunningRequest:
    """The request in the pipeline, as the engine's thread keeps it.

    Attributes:
        awaited: keys of the stages that have begun it and not yet answered its end.
        stats, traces: what those that have answered said, by key and by name.
        gone: what stages that have left had done until then.
    """

    handle: RequestHandle
    verification: Verification
    finish_reason: str | None = None
    finished_s: float = 0.0
    awaited: set[str] = field(default_factory=set)
    stats: dict[str, StageStats] = field(default_factory=dict)
    gone: list[StageStats] = field(default_factory=list)
    traces: dict[str, list[TraceEvent]] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    plan_changes: int = 0

    def begin_message(self, place: int, vocab_size: int) -> dict[str, Any]:
        """What a worker is told; `place` counts stages from the target, `vocab_size` is the target's."""
        handle = self.handle
        return {
            "type": "begin",
            "request": handle.id,
            "stage": place,
            "prompt": handle.prompt,
            "params": handle.params.model_dump(mode="json"),
            "eos": list(handle.eos_token_ids),
            "vocab_size": vocab_size,
            "verification": self.verification.value,
            "processor": handle.processor is not None,
            "trace": handle.trace,
        }

    def is_over(self, target: str) -> bool:
        """Whether it has ended and all figures are in (or have kept us waiting too long)."""
        if self.finish_reason is None:
            return False
        patience_over = time.monotonic() - self.finished_s > STATS_GRACE_S
        return not self.awaited or (patience_over and target not in self.awaited)

    def outcome(self, plan: Plan) -> Outcome:
        return Outcome(self.finish_reason or "cancelled", self._summary(plan), self.traces)

    def _summary(self, plan: Plan) -> RequestStats:
        handle, keys = self.handle, stage_keys(plan)
        chain = [*self.gone, *(self.stats[key] for key in keys if key in self.stats)]
        begun, end = handle.begun_s or handle.submitted_s, handle.last_token_s or self.finished_s
        first = handle.first_token_s
        lengths = self.stats[keys[-1]].acceptance_lengths if keys[-1] in self.stats else {}
        count = sum(lengths.values())
        per_token_s: float | None = None
        if first is not None:
            per_token_s = (end - first) / (handle.num_tokens - 1) if handle.num_tokens > 1 else first - begun
        return RequestStats(
            total_s=end - handle.submitted_s,
            queued_s=begun - handle.submitted_s,
            ttft_s=None if first is None else first - handle.submitted_s,
            ms_per_token=None if per_token_s is None else 1e3 * per_token_s,
            acceptance_length=sum(n * times for n, times in lengths.items()) / count if count else None,
            acceptance_histogram=dict(sorted(lengths.items())),
            stages=report_stages(chain),
            fallbacks=self.fallbacks,
            plan_changes=self.plan_changes,
        )
