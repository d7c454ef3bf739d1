"""What the service has delivered lately: tokens, gaps between them, first tokens, energy."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Beat:
    """Deliveries of a stretch of time.

    Attributes:
        seconds: how long it was.
        num_tokens: output tokens of all choices.
        decode_tokens, decode_s: of these, those after the first of their choice, and the seconds their clients waited.
        ttfts_s: submission to first token, of the choices whose first token fell into it.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    ttfts_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


class Pulse:
    """Collects deliveries from any thread; `take` gives those since the last call."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._beat = Beat()
        self._since_s = time.monotonic()
        self.last_activity_s = self._since_s

    def first(self, num_tokens: int, ttft_s: float) -> None:
        """A choice got its first tokens."""
        with self._gate:
            self._beat.num_tokens += num_tokens
            self._beat.ttfts_s.append(ttft_s)

    def more(self, num_tokens: int, since_s: float) -> None:
        """A choice got tokens, `since_s` after those before."""
        with self._gate:
            self._beat.num_tokens += num_tokens
            self._beat.decode_tokens += num_tokens
            self._beat.decode_s += since_s

    def touch(self) -> None:
        """Somebody wants something: the service is not idle."""
        self.last_activity_s = time.monotonic()

    def take(self) -> Beat:
        now = time.monotonic()
        with self._gate:
            beat, self._beat = self._beat, Beat()
            beat.seconds, self._since_s = now - self._since_s, now
        return beat
