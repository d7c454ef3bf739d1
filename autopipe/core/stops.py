"""Finds the first of several stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from autopipe.core.errors import ConfigError


class StopMatcher:
    """An automaton (Aho and Corasick, "Efficient string matching", 1975) over the characters of a text.

    The match that ends first wins; among those that end together, the longest. So the result does not depend on how
    the text is cut into pieces. Cost: O(1) per character, amortised.

    Args:
        stops: stop strings; may be none.

    Raises:
        ConfigError: an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ConfigError("stop", "", "strings of at least one character")
        self._next: list[dict[str, int]] = [{}]  # by state: character -> state, the edges of the trie
        self._depth = [0]  # by state: characters from the root, the longest suffix that can begin a stop string
        self._match = [0]  # by state: length of the longest stop string that ends here, 0 for none
        for stop in stops:
            self._add(stop)
        self._fail = self._link()
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take a piece of text.

        Returns:
            The text that can no longer be part of a stop string, and whether a stop string was found; the text then
            ends just before it, and nothing may be pushed after it.
        """
        if len(self._next) == 1:
            return text, False
        text = self._held + text
        for end in range(len(self._held), len(text)):
            self._state = self._step(self._state, text[end])
            if self._match[self._state]:
                self._held = ""
                return text[: end + 1 - self._match[self._state]], True
        free = len(text) - self._depth[self._state]
        self._held = text[free:]
        return text[:free], False

    def finish(self) -> str:
        """The text still held: it began like a stop string, but the text ended."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][character]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = following
        self._match[state] = len(stop)

    def _link(self) -> list[int]:
        """Failure links, breadth first: of each state, the state of its longest proper suffix in the trie."""
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                fail = self._fail[following] = self._step(self._fail[state], character)
                self._match[following] = self._match[following] or self._match[fail]
                queue.append(following)
        return self._fail
