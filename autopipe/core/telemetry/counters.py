"""Differences of counters that wrap around or start anew; figures asked once when unsupported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from autopipe.core.telemetry.snapshot import EnergyCounter

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Unsupported(Exception):
    """Raised by what `AskOnce` calls: the device will never have this figure."""


class Unreadable(Exception):
    """Raised by what `AskOnce` calls: no figure this time."""


def counter_delta(previous: int, current: int, modulus: int) -> int | None:
    """How far a counter modulo `modulus` went on; None when it must have been reset.

    A reset and a wrap both look like a fall. Read many times per revolution, a real step is short; so a step
    of half a revolution or more is taken for a reset.
    """
    delta = (current - previous) % modulus
    return delta if delta < modulus // 2 else None


class CounterTotal:
    """Undoes the wrap-around of an energy counter.

    Args:
        joules_per_unit: what one count is worth.
    """

    def __init__(self, joules_per_unit: float) -> None:
        self._joules_per_unit = joules_per_unit
        self._previous: int | None = None
        self._total = 0
        self._epoch = 0

    def update(self, value: int, modulus: int) -> EnergyCounter:
        """Take a reading (0 to `modulus` - 1) and give the total, which starts at the first reading."""
        if self._previous is None:
            self._total = value
        else:
            delta = counter_delta(self._previous, value, modulus)
            if delta is None:
                self._epoch += 1
            else:
                self._total += delta
        self._previous = value
        return EnergyCounter(self._total * self._joules_per_unit, self._epoch)


class CounterRate:
    """Turns readings of a cumulative counter into a rate per second."""

    def __init__(self) -> None:
        self._previous: tuple[float, int] | None = None

    def update(self, time_s: float, value: int, modulus: int) -> float | None:
        """Counts per second since the last reading; None for the first one and after a reset."""
        previous, self._previous = self._previous, (time_s, value)
        if previous is None or time_s <= previous[0]:
            return None
        delta = counter_delta(previous[1], value, modulus)
        return None if delta is None else delta / (time_s - previous[0])

    def forget(self) -> None:
        """The next reading is a first one (after a gap)."""
        self._previous = None


class AskOnce:
    """Asks for a device's figures and remembers which it does not have.

    A figure may have several ways to be asked, best first; the first that is supported is kept.

    Args:
        device: for the log.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._dead: set[tuple[str, int]] = set()
        self._problem: str | None = None

    def __call__(self, figure: str, *ways: Callable[[], T]) -> T | None:
        """The figure, or None. A way that raises `Unsupported` is not tried again, `Unreadable` is."""
        for index, way in enumerate(ways):
            if (figure, index) in self._dead:
                continue
            try:
                return way()
            except Unreadable as error:
                self._problem = str(error)
                return None
            except Unsupported as error:
                self._dead.add((figure, index))
                logger.debug("%s does not have %s (%s)", self._device, figure, error)
        return None

    def has(self, figure: str, num_ways: int = 1) -> bool:
        """Whether some way of asking is still open."""
        return any((figure, index) not in self._dead for index in range(num_ways))

    def take_problem(self) -> str | None:
        """The newest `Unreadable` since the last call, in words."""
        problem, self._problem = self._problem, None
        return problem
