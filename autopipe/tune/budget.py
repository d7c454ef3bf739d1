"""Time: how long everything may take, and which part of it each phase gets."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autopipe.core.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_PARTS = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
_ALLOWED = "a time such as 90s, 10m or 1h30m, of at least 1 s"

PROFILE_SHARE = 0.55
"""Of the budget, at most; what is in the cache takes none."""
SEARCH_SHARE = 0.15
_SEARCH_MOST_S = 90.0
_LEAST_LIVE_SHARE = 0.2
_LAST_SHARE = 0.05
_LAST_MOST_S = 10.0


def parse_budget(text: str, key: str = "--budget") -> float:
    """Seconds of `90s`, `10m`, `1h30m`; a bare number is seconds.

    Raises:
        ConfigError: not a time, or under a second.
    """
    compact = text.strip().lower().replace(" ", "")
    parts = _PARTS.findall(compact)
    if parts and "".join(number + unit for number, unit in parts) == compact:
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    else:
        try:
            seconds = float(compact)
        except ValueError:
            raise ConfigError(key, text, _ALLOWED) from None
    if not 1 <= seconds < 1e9:
        raise ConfigError(key, text, _ALLOWED)
    return seconds


@dataclass(slots=True)
class Budget:
    """Deadlines of the phases, on the clock of `time.monotonic`. A phase that ends early leaves its time to others."""

    total_s: float
    clock: Callable[[], float] = time.monotonic
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    @property
    def end_s(self) -> float:
        return self.started_s + self.total_s

    @property
    def spent_s(self) -> float:
        return self.clock() - self.started_s

    def profile_deadline_s(self) -> float:
        return self.started_s + PROFILE_SHARE * self.total_s

    def search_deadline_s(self, counted: bool = False) -> float:
        """From now on; at most a minute and a half, as simulations soon find nothing new.

        Args:
            counted: a number of trials was asked for: they may take all the time but what the live check needs.
        """
        if counted:
            return max(self.clock(), self.live_deadline_s() - _LEAST_LIVE_SHARE * self.total_s)
        return min(self.clock() + min(_SEARCH_MOST_S, SEARCH_SHARE * self.total_s), self.live_deadline_s())

    def live_deadline_s(self) -> float:
        """Leaves time for the report."""
        return self.end_s - min(_LAST_MOST_S, _LAST_SHARE * self.total_s)
