"""What the service has delivered lately."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Beat:
    """A stretch of time, and the output tokens that clients got in it."""

    seconds: float = 0.0
    num_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


class Pulse:
    """Counts deliveries from any thread; `take` gives those since the last call.

    Attributes:
        last_activity_s: when somebody last wanted something, by the monotonic clock.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._num_tokens = 0
        self._since_s = time.monotonic()
        self.last_activity_s = self._since_s

    def delivered(self, num_tokens: int) -> None:
        """A choice got tokens."""
        with self._gate:
            self._num_tokens += num_tokens

    def touch(self) -> None:
        """Somebody wants something: the service is not idle."""
        self.last_activity_s = time.monotonic()

    def take(self) -> Beat:
        now_s = time.monotonic()
        with self._gate:
            beat = Beat(now_s - self._since_s, self._num_tokens)
            self._num_tokens, self._since_s = 0, now_s
        return beat
