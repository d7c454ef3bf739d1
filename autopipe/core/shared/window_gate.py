"""How many neural drafts are worth their rows and their drafter's steps when requests share a target."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from autopipe.core.gating import StepCosts

_KEPT = 0.98
"""What an old observation still counts after a new one of its depth."""
_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 4.0
_TRY_EVERY = 16
"""Every so many steps one request is to draft the whole window, whatever it is worth, to see whether that has
changed."""


class WindowGate:
    """Learns how often the j-th draft is accepted where all before it were, and what drafting costs.

    One request may draft as the plan says: its rows cost little more than the weights that are read anyway. Of many,
    each draft is a row that takes its time, so the common window is the one with the most tokens per second.
    """

    def __init__(self) -> None:
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self._seconds = StepCosts()  # of drafting one token for so many requests
        self._steps = 0

    def observe_drafting(self, num_requests: int, depth: int, seconds: float) -> None:
        """Drafting up to `depth` tokens for each of so many requests took so long."""
        if depth and num_requests:
            self._seconds.observe(num_requests, max(seconds / depth, 1e-9))

    def observe_verdict(self, num_drafts: int, num_accepted: int) -> None:
        """Of a request's drafts so many were accepted."""
        while len(self._reached) < num_drafts:
            self._reached.append(0.0)
            self._accepted.append(0.0)
        for place in range(min(num_drafts, num_accepted + 1)):
            self._reached[place] = _KEPT * self._reached[place] + 1.0
            self._accepted[place] = _KEPT * self._accepted[place] + (place < num_accepted)

    def rate(self, place: int) -> float:
        """Chance that the draft at a place (from 0) is accepted, given that all before it are."""
        if place >= len(self._reached):
            return _PRIOR_RATE
        return (self._accepted[place] + _PRIOR_RATE * _PRIOR_WEIGHT) / (self._reached[place] + _PRIOR_WEIGHT)

    def window(self, num_requests: int, window: int, base_rows: int, costs: StepCosts) -> int:
        """Drafts for each of so many requests, 0 to `window`.

        With k drafts for each, a step emits n (1 + r_1 + r_1 r_2 + ... ) tokens in t(base_rows + n k) + k d(n) seconds.

        Args:
            base_rows: rows of the step without drafts, prompts included.
            costs: t of the target.
        """
        if num_requests <= 1:
            return window
        gains = [1.0, *accumulate((self.rate(place) for place in range(window)), mul)]
        draft_s = self._seconds.seconds(num_requests)

        def pace(k: int) -> float:
            return float(sum(gains[: k + 1]) / (costs.seconds(max(1, base_rows + num_requests * k)) + k * draft_s))

        return max(range(window + 1), key=pace)

    def trial_is_due(self) -> bool:
        """Whether a request should draft the whole window now. Asked once a step."""
        self._steps += 1
        return self._steps % _TRY_EVERY == 0
