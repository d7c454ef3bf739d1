"""Counts of the tokens in a sequence that grows at its end and can be rolled back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """How often each token occurs, as arrays to index logits with; push and pop cost O(1)."""

    def __init__(self) -> None:
        self._history: list[int] = []
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens in order of their first occurrence [k]; a view, valid until the next change."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Occurrences of `ids` [k]; a view, valid until the next change."""
        return self._counts[: len(self._slots)]

    def push(self, token_id: int) -> None:
        self._history.append(token_id)
        slot = self._slots.get(token_id)
        if slot is not None:
            self._counts[slot] += 1
            return
        slot = self._slots[token_id] = len(self._slots)
        if slot == len(self._ids):
            self._ids = np.resize(self._ids, 2 * slot)
            self._counts = np.resize(self._counts, 2 * slot)
        self._ids[slot], self._counts[slot] = token_id, 1

    def pop(self) -> None:
        """Forget the last token. A token whose only occurrence this was has the last slot, as slots come in order."""
        token_id = self._history.pop()
        slot = self._slots[token_id]
        self._counts[slot] -= 1
        if self._counts[slot] == 0:
            del self._slots[token_id]

    def update(self, tokens: Sequence[int]) -> None:
        """Make the sequence equal to `tokens`: pop what differs, push the rest."""
        tokens = list(tokens)
        keep = _common_prefix_length(self._history, tokens)
        while len(self._history) > keep:
            self.pop()
        for token_id in tokens[keep:]:
            self.push(token_id)


def _common_prefix_length(left: list[int], right: list[int]) -> int:
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:  # the usual case, one comparison in C
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
