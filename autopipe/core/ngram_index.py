"""Incremental index of one sequence: which tokens followed a suffix before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopipe.core.errors import ConfigError

_TOKEN_BITS = 32


class SuffixMatch(NamedTuple):
    """The longest suffix that occurred in the sequence with a successor.

    Attributes:
        order: its length in tokens, at most the index's max_order.
        successors: what followed each occurrence, oldest first. Not to be changed; valid until the next push
            or pop.
    """

    order: int
    successors: Sequence[int]


class SuffixIndex:
    """Successors of every n-gram of one sequence, n = min_order .. max_order.

    A trie over contexts read backwards: the node of `b c` is the child `b` of the node of `c`, so the longest
    match is one walk that stops at the first suffix never seen. Push, pop and match take at most max_order
    dictionary look-ups; nothing is rescanned. Nodes are numbered in the order of creation, and a pop undoes its
    push exactly, so a rolled-back and regrown index equals one built anew.
    """

    def __init__(self, min_order: int, max_order: int) -> None:
        self._min_order = min_order
        self._max_order = max_order
        self._tokens: list[int] = []
        self._children: dict[int, int] = {}  # node << _TOKEN_BITS | token -> child node
        self._successors: list[list[int]] = [[]]  # by node; node 0 is the empty context

    def __len__(self) -> int:
        return len(self._tokens)

    def tail(self, num_tokens: int) -> list[int]:
        """The last `num_tokens` (at least 1; fewer in a shorter sequence), a new list."""
        return self._tokens[-num_tokens:]

    def match(self, text: Sequence[int]) -> SuffixMatch | None:
        """The longest suffix of `text` that occurred in the sequence, or None below min_order tokens."""
        children = self._children
        node = order = 0
        for depth in range(1, min(self._max_order, len(text)) + 1):
            child = children.get(node << _TOKEN_BITS | text[-depth])
            if child is None:
                break
            node, order = child, depth
        return SuffixMatch(order, self._successors[node]) if order >= self._min_order else None

    def push(self, token: int) -> None:
        """Append a token."""
        tokens, children, successors = self._tokens, self._children, self._successors
        node = 0
        for depth in range(1, min(self._max_order, len(tokens)) + 1):
            edge = node << _TOKEN_BITS | tokens[-depth]
            child = children.get(edge)
            if child is None:
                node = children[edge] = len(successors)
                successors.append([token])
            else:
                node = child
                successors[node].append(token)
        tokens.append(token)

    def pop(self) -> int:
        """Remove and return the last token.

        Raises:
            ConfigError: the sequence is empty.
        """
        if not self._tokens:
            raise ConfigError("pop", "an empty sequence", "a sequence of at least one token")
        tokens, children, successors = self._tokens, self._children, self._successors
        removed = tokens.pop()
        node, created = 0, []
        for depth in range(1, min(self._max_order, len(tokens)) + 1):
            edge = node << _TOKEN_BITS | tokens[-depth]
            node = children[edge]
            successors[node].pop()
            if not successors[node]:
                created.append(edge)
        for edge in created:
            del children[edge]
        if created:
            del successors[-len(created) :]
        return removed

    def clear(self) -> None:
        """Forget the sequence."""
        self._tokens.clear()
        self._children.clear()
        del self._successors[1:]
