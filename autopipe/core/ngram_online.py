"""An n-gram table that learns while serving: the more it is used, the more it knows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autopipe.core.errors import ConfigError
from autopipe.core.ngram_counting import as_table
from autopipe.core.ngram_table import NgramTable, TableMatch, context_keys

MAX_ORDER = 5
DEFAULT_ENTRIES = 100_000
BYTES_PER_ENTRY = 250
"""What an entry costs in Python, rounded up; measured with tracemalloc."""
_MOST = 255
_TOKEN_SHIFT = 16


class OnlineNgrams:
    """Contexts of 1 to 5 tokens and the token that mostly followed each in the text served so far.

    Bounded: when full, the context not seen for longest makes room. A context keeps one successor by majority
    (Boyer and Moore's vote), so a change of habit replaces it soon. Lives in one process; nothing is shared or
    written unless `save` is called. Several threads may use it.

    Args:
        max_entries: most contexts kept, about 250 bytes each.

    Raises:
        ConfigError: fewer than 1.
    """

    def __init__(self, max_entries: int = DEFAULT_ENTRIES) -> None:
        if max_entries < 1:
            raise ConfigError("ngram.online_entries", max_entries, "1 or more")
        self._max_entries = max_entries
        self._writing = threading.Lock()
        self._entries: OrderedDict[int, int] = OrderedDict()  # context -> token << 16 | votes << 8 | occurrences

    def __len__(self) -> int:
        return len(self._entries)

    def learn(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Take in tokens[start:end], each after the tokens before it."""
        with self._writing:
            for position in range(start, end):
                token = tokens[position]
                for key in context_keys(tokens[max(0, position - MAX_ORDER) : position], MAX_ORDER):
                    self._count(key, token)

    def match_keys(self, keys: Sequence[int]) -> TableMatch | None:
        """The entry of the longest of these contexts (from `context_keys`, shortest first), or None."""
        entries = self._entries
        for order in range(min(len(keys), MAX_ORDER), 0, -1):
            value = entries.get(keys[order - 1])
            if value is not None:
                votes, occurrences = value >> 8 & _MOST, value & _MOST
                return TableMatch(order, value >> _TOKEN_SHIFT, occurrences, votes * _MOST // occurrences)
        return None

    def save(self, path: str | Path) -> None:
        """Write what was learned as an n-gram table, to be given as `ngram.table` later.

        Raises:
            ConfigError: the file cannot be written.
        """
        with self._writing:
            keys = np.array(list(self._entries), dtype=np.uint64)
            values = np.array(list(self._entries.values()), dtype=np.uint64)
        votes, occurrences = values >> np.uint64(8) & np.uint64(_MOST), values & np.uint64(_MOST)
        shares = votes * np.uint64(_MOST) // np.maximum(occurrences, np.uint64(1))
        arrays = as_table(keys, values >> np.uint64(_TOKEN_SHIFT), occurrences, shares)
        NgramTable.of(arrays, MAX_ORDER, {"learned": "online"}).save(path)

    def _count(self, key: int, token: int) -> None:
        entries = self._entries
        value = entries.get(key)
        if value is None:
            if len(entries) >= self._max_entries:
                entries.popitem(last=False)
            entries[key] = token << _TOKEN_SHIFT | 1 << 8 | 1
            return
        kept, votes, occurrences = value >> _TOKEN_SHIFT, value >> 8 & _MOST, value & _MOST
        if occurrences == _MOST:
            votes, occurrences = votes // 2, occurrences // 2
        if kept == token:
            votes += 1
        elif votes > 1:
            votes -= 1
        else:
            kept, votes = token, 1
        entries[key] = kept << _TOKEN_SHIFT | votes << 8 | occurrences + 1
        entries.move_to_end(key)
