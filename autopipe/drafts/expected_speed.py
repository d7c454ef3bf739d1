"""How fast decoding would be with an n-gram drafter: its offers, replayed, against the cost of verifying them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.core.gating import StepCosts, best_length
from autopipe.profile.model import NgramOffer

DEFAULT_WINDOW = 11
"""As in the default plan: with the token before them, eleven drafts are twelve rows, up to which the fused target's
forward grows slowly (1.5 times that of one row; 16 rows: 2.1 times)."""


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """A replay's outcome.

    Attributes:
        num_tokens: output tokens after each answer's first.
        num_steps: forwards of the target.
        seconds: they take.
        plain_seconds: plain decoding would take.
    """

    num_tokens: int
    num_steps: int
    seconds: float
    plain_seconds: float

    @property
    def speedup(self) -> float:
        """Over plain decoding, prefill not counted; 1 for no tokens."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per forward; 1 for none."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0


def expected_speed(
    offers: Iterable[NgramOffer], costs: StepCosts, overhead_s: float = 0.0, window: int = DEFAULT_WINDOW
) -> ExpectedSpeed:
    """Walk through answers as the engine would: offer, gate, verify, go on after the first draft that was wrong.

    Args:
        offers: from `autopipe.profile.ngram_replay`, at every position of each answer.
        costs: t(n) of the target's forward.
        overhead_s: seconds of a step beside the forward.
        window: most drafts of a step.
    """
    tokens = steps = 0
    seconds = 0.0
    for offer in offers:
        length = len(offer.length)
        position = 1  # the first token comes from the prefill
        while position < length:
            confidence = offer.confidence[position][: min(window, length - position - 1)]
            num_drafts = best_length(confidence, costs, overhead_s)
            emitted = min(num_drafts, offer.right[position]) + 1
            seconds += costs.seconds(num_drafts + 1) + overhead_s
            steps += 1
            position += emitted
        tokens += max(length - 1, 0)
    return ExpectedSpeed(tokens, steps, seconds, tokens * (costs.seconds(1) + overhead_s))
