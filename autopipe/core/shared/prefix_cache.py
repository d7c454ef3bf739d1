"""KV caches of finished requests, kept for requests that begin alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

MIN_REUSE = 8
"""Shorter common beginnings are computed again: taking them over costs a page's copy."""

Ids = npt.NDArray[np.int32]


def common_length(a: Ids, b: Ids) -> int:
    """Length of the common beginning."""
    count = min(len(a), len(b))
    differ = a[:count] != b[:count]
    first = int(differ.argmax()) if count else 0
    return first if count and differ[first] else count


class PrefixCache:
    """Which slot holds the KV of which tokens; the least recently used entry goes first.

    Args:
        capacity: entries at most.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[int, Ids] = OrderedDict()  # slot -> tokens, the latest used last

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, slot: int, tokens: Sequence[int]) -> list[int]:
        """Keep a slot whose KV cache holds `tokens`; return slots that are not needed any more (perhaps this one)."""
        if self.capacity == 0 or len(tokens) < MIN_REUSE:
            return [slot]
        ids = np.asarray(tokens, dtype=np.int32)
        free: list[int] = []
        for other, held in list(self._entries.items()):
            shared = common_length(ids, held)
            if shared == len(ids):  # what it holds, and more, is here already
                self._entries.move_to_end(other)
                return [slot]
            if shared == len(held):
                del self._entries[other]
                free.append(other)
        self._entries[slot] = ids
        while len(self._entries) > self.capacity:
            free.append(self.evict())
        return free

    def find(self, tokens: Ids) -> tuple[int, int]:
        """(slot, length) of the entry with the longest common beginning; length 0: none."""
        best = max(((common_length(tokens, held), slot) for slot, held in self._entries.items()), default=(0, -1))
        if best[0]:
            self._entries.move_to_end(best[1])
        return best[1], best[0]

    def evict(self) -> int:
        """Give up the least recently used entry; return its slot. KeyError when there is none."""
        return self._entries.popitem(last=False)[0]

    def clear(self) -> Iterable[int]:
        """Give up everything; return the slots."""
        slots = list(self._entries)
        self._entries.clear()
        return slots
