"""Reads a running engine's progress from outside, as the blocks that `LiveMeter` measures; nobody has to feed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopipe.core.live_engine import LiveEngine
from autopipe.core.request import RequestHandle
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.stream import Block, LiveRequest

KindOf = Callable[[Sequence[int]], PromptKind]


class EngineWatch:
    """Follows request after request by the counters of its handle.

    Where an engine runs several at once, the one that has run longest stands for all: times are divided by the
    engine's `load_factor`, so that a plan is not blamed for the load.

    Args:
        kind_of: the kind of a prompt, from its token ids; called once a request.
    """

    def __init__(self, engine: LiveEngine, kind_of: KindOf | None = None) -> None:
        self._engine = engine
        self._kind_of = kind_of
        self._handle: RequestHandle | None = None
        self._request: LiveRequest | None = None
        self._position = 0
        self._last_s = max((handle.last_token_s or 0.0 for handle in engine.recent), default=0.0)
        self._number = 0

    def poll(self) -> list[Block]:
        """Tokens since the last call. Of a request that ended meanwhile its tail comes, too, and all of one that began
        and ended between two calls, unless another ran beside it."""
        running = self._engine.running
        blocks: list[Block] = [] if self._handle is None else self._news(self._handle)
        if running is not None and running is self._handle:
            return blocks
        self._handle = None
        for handle in self._engine.recent:
            if handle.ended and self._is_news(handle):
                self._follow(handle)
                blocks += self._news(handle)
        if running is not None:
            self._follow(running)
            blocks += self._news(running)
        self._handle = running
        return blocks

    def _is_news(self, handle: RequestHandle) -> bool:
        """Whether it gave tokens, and began after all that has been told of."""
        return handle.last_token_s is not None and handle.begun_s is not None and handle.begun_s >= self._last_s

    def _follow(self, handle: RequestHandle) -> None:
        kind = PromptKind.OTHER if self._kind_of is None else self._kind_of(handle.prompt)
        self._position, self._number = 0, self._number + 1
        self._request = LiveRequest(tuple(handle.prompt), kind, handle.params)

    def _news(self, handle: RequestHandle) -> list[Block]:
        """The first token as a block of its own: it takes the prefill, whatever the plan."""
        blocks: list[Block] = []
        first_s = handle.first_token_s
        if self._position == 0 and first_s is not None:
            blocks.append(self._block(1, first_s, first_s - handle.submitted_s))
        last_s, num_new = handle.last_token_s, handle.num_tokens - self._position
        if self._position > 0 and num_new > 0 and last_s is not None:
            alone_s = max(last_s - self._last_s, 0.0) / max(self._engine.load_factor(), 1.0)
            blocks.append(self._block(num_new, last_s, alone_s))
        return blocks

    def _block(self, num_tokens: int, time_s: float, since_s: float) -> Block:
        if self._request is None:
            raise RuntimeError("no request is followed")
        self._position += num_tokens
        self._last_s = time_s
        is_first = self._position == num_tokens
        return Block(self._request, self._number, time_s, since_s, num_tokens, self._position, is_first)
