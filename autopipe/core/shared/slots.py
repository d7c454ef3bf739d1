"""Slots of the batch runner: handed to requests, kept for their prefixes, taken back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from autopipe.core.backends.batch import BatchRunner
from autopipe.core.shared.prefix_cache import MIN_REUSE, PrefixCache, common_length


class Seated(Protocol):
    """A request at one model.

    Attributes:
        tokens: its text so far.
        slot: of the model's batch runner; -1: none.
        cached: tokens of the text in that slot's KV cache.
        reused: counts tokens whose KV came from other sequences.
    """

    tokens: list[int]
    slot: int
    cached: int
    reused: int


class SlotKeeper:
    """Gives requests slots, and KV that others have computed already.

    Args:
        cached_sequences: finished sequences kept at most; 0: none, and nothing is shared.
    """

    def __init__(self, runner: BatchRunner, cached_sequences: int) -> None:
        self.prefix_hits = 0
        self.tokens_reused = 0
        self.evictions = 0
        self._runner = runner
        if runner.whole_prompts:  # nothing of one may be taken over from another
            cached_sequences = 0
        self._shares = cached_sequences > 0
        self._cache = PrefixCache(cached_sequences)
        self._free = list(reversed(range(runner.slots)))
        self._parked: OrderedDict[Seated, tuple[int, int]] = OrderedDict()  # slot and cached tokens, the oldest first

    @property
    def num_cached(self) -> int:
        """Finished sequences that are kept."""
        return len(self._cache)

    def admit(self, request: Seated) -> bool:
        """Give a request an empty slot, or the one it was parked with; False when there is none."""
        if request in self._parked:
            request.slot, request.cached = self._parked.pop(request)
            return True
        while not self._free:
            if not self.evict():
                return False
        request.slot, request.cached = self._free.pop(), 0
        return True

    def evict(self, besides: Seated | None = None) -> bool:
        """Give up the finished sequence used least recently, or else the one parked last, which comes again last.

        Args:
            besides: one that is not given up.

        Returns:
            False when there is none.
        """
        if len(self._cache):
            self._drop([self._cache.evict()])
        elif (last := next((each for each in reversed(self._parked) if each is not besides), None)) is not None:
            self.forget(last)
        else:
            return False
        self.evictions += 1
        return True

    def release(self, request: Seated, *, keep: bool) -> None:
        """Take a request's slot back; with `keep`, its KV may serve others."""
        slot, request.slot = request.slot, -1
        cached, request.cached = request.cached, 0
        self._drop(self._cache.put(slot, request.tokens[:cached]) if keep else [slot])

    def park(self, request: Seated) -> None:
        """Take a request's slot back, with its KV for nobody but itself, when it comes again."""
        self._parked[request] = request.slot, request.cached
        request.slot, request.cached = -1, 0

    def num_parked(self, request: Seated) -> int:
        """Tokens of a request's text whose KV is parked."""
        return self._parked[request][1] if request in self._parked else 0

    def forget(self, request: Seated) -> None:
        """A request that may be parked does not come again."""
        slot, _ = self._parked.pop(request, (-1, 0))
        self._drop([slot] if slot >= 0 else [])

    def reuse(self, request: Seated, active: Iterable[Seated]) -> int:
        """Take over the KV of the longest common beginning that another sequence holds; return the tokens gained.

        The last token is always left to read: the choice of the next one needs its row.
        """
        if not self._shares:
            return 0
        ids = np.asarray(request.tokens[:-1], dtype=np.int32)
        source, length = self._cache.find(ids)
        for other in active:
            if other is not request and other.cached > length:
                shared = common_length(ids, np.asarray(other.tokens[: other.cached], dtype=np.int32))
                if shared > length:
                    source, length = other.slot, shared
        gained = length - request.cached
        if gained < MIN_REUSE:
            return 0
        request.cached = 0  # the slot is emptied first, and stays so where memory is short
        self._runner.copy_prefix(source, request.slot, length)
        request.cached = length
        request.reused += gained
        self.prefix_hits += 1
        self.tokens_reused += gained
        return gained

    def clear(self) -> None:
        """Forget all finished sequences."""
        self._drop(self._cache.clear())

    def _drop(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._runner.reset(slot)
            self._free.append(slot)
