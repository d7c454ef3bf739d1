"""How fast requests end, to tell those that are refused when to come back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_KEPT = 64
_LEAST_S = 1.0
_MOST_S = 60.0


class FinishRate:
    """Times of the last 64 ends.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_KEPT)

    def count(self) -> None:
        """A request has ended."""
        self._ends.append(self._clock())

    def seconds_until(self, num_ends: int) -> float:
        """Estimate of the time in which so many more requests end, 1 to 60 s; 1 s before anything is known."""
        if len(self._ends) < 2:
            return _LEAST_S
        span = max(self._clock() - self._ends[0], 1e-3)
        return min(_MOST_S, max(_LEAST_S, num_ends * span / len(self._ends)))
