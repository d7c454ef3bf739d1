"""Books what a simulated run did in a control interval, by drafter slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.chains import Seat
from autopipe.envs.interval import SlotFigures
from autopipe.envs.simulator import SimRun, kernel


@dataclass(slots=True)
class Seating:
    """Who computes in the run, and what of its counters is already booked.

    Attributes:
        ngram_slot: slot of the n-gram drafter in front of the first seat, or None.
        cold: seats whose next forward is a prefill.
    """

    seats: list[Seat]
    ngram_slot: int | None = None
    cold: set[int] = field(default_factory=set)
    count: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, kernel.NUM_COUNTS), dtype=np.int64))
    busy_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def start_from(self, run: SimRun) -> None:
        """Book from here on."""
        self.count, self.busy_s = run.count.copy(), run.busy_s.copy()


class Ledger:
    """Sums over the stretches of one interval.

    Attributes:
        busy_s: seconds of computing by slot, the target's last, float64 [slots + 1].
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotFigures.zeros(num_slots)
        self.busy_s = np.zeros(num_slots + 1)
        self._forwards = np.zeros(num_slots + 1)
        self._step_s = np.zeros(num_slots + 1)

    def book(self, run: SimRun, seating: Seating, windows: NDArray[np.int64]) -> None:
        """Book what `run` did since the last time.

        Args:
            windows: by slot, int64 [slots].
        """
        count, busy_s = run.count - seating.count, run.busy_s - seating.busy_s
        seating.start_from(run)
        producer = seating.ngram_slot
        for index, seat in enumerate(seating.seats):
            slot, forwards, seconds = seat.slot, float(count[index, kernel.FORWARDS]), float(busy_s[index])
            self.busy_s[slot] += seconds
            if index in seating.cold and forwards:
                seating.cold.discard(index)
                stage = run.chain.stages[index]
                forwards, seconds = forwards - 1, max(0.0, seconds - (stage.prefill_s or 0.0) - stage.overhead_s)
            if forwards > 0 and seconds > 0:
                self._forwards[slot] += forwards
                self._step_s[slot] += seconds
            if producer is not None:
                self.slots.proposed[producer] += count[index, kernel.PROPOSED]
                self.slots.accepted[producer] += count[index, kernel.ACCEPTED]
                self.slots.room[producer] += forwards * windows[producer]
            if seat.slot < len(self.slots.rollbacks):
                self.slots.rollbacks[seat.slot] += count[index, kernel.ROLLBACKS]
            producer = seat.slot

    def close(self) -> SlotFigures:
        """The figures of the interval."""
        np.divide(self._step_s, self._forwards, out=self.slots.step_s, where=self._forwards > 0)
        return self.slots
