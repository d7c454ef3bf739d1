"""What a stage's steps cost, what they achieved, and how long the one under way may take."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.core.board import Progress
from autopipe.core.gating import StepCosts
from autopipe.core.stats import StageStats
from autopipe.core.trace import TraceEvent

_GRACE_NS = 500_000_000
_PATIENCE = 3
_LATE_NS = 800_000_000
"""A forward this much later than expected counts as hung, whatever it costs: noticed within a second."""
_SHORT_PREFILL = 16
"""Tokens up to which a prefill takes about the same time."""
_UNKNOWN_STEP_NS = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Step:
    """One forward and its verification.

    Attributes:
        name: decode, draft, verify or prefill.
        num_missing: tokens of the sequence that the cache lacked, the last one included.
        num_drafts, num_accepted, num_emitted: tokens verified, accepted, appended.
        start_ns, computed_ns, finished_ns: monotonic clock: begun, logits there, all done.
    """

    name: str
    num_missing: int
    num_drafts: int
    num_accepted: int
    num_emitted: int
    start_ns: int
    computed_ns: int
    finished_ns: int

    @property
    def is_prefill(self) -> bool:
        return self.name == "prefill"


class StageMeter:
    """Counts one stage's steps and learns their costs.

    Attributes:
        costs: t(n) of its forwards; kept from request to request.
        measured: whether `costs` rests on a measurement.
        stats: counters of the request under way.
        trace: its events, if asked for.
    """

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.measured = False
        self.stats = StageStats()
        self.trace: list[TraceEvent] | None = None
        self._prefill_ns_per_token: float | None = None

    def begin(self, name: str, trace: bool) -> None:
        """Start counting for a new request."""
        self.stats = StageStats(name=name)
        self.trace = [] if trace else None

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A forward of `num_tokens` took `seconds`."""
        self.costs.observe(num_tokens, max(seconds, 1e-9))
        self.measured = True

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A prefill of `num_tokens` took `seconds`."""
        self._prefill_ns_per_token = 1e9 * seconds / max(num_tokens, _SHORT_PREFILL)

    def allowed_ns(self, num_tokens: int, prefill: bool) -> int:
        """How long a step may take before its stage counts as hung."""
        if prefill:
            per_token = self._prefill_ns_per_token
            if per_token is None:
                return _UNKNOWN_STEP_NS
            return _GRACE_NS + int(_PATIENCE * per_token * max(num_tokens, _SHORT_PREFILL))
        if not self.measured:
            return _UNKNOWN_STEP_NS
        expected = int(1e9 * self.costs.seconds(num_tokens))
        return expected + min(_GRACE_NS + (_PATIENCE - 1) * expected, _LATE_NS)

    def count(self, step: Step, producer: str) -> Progress:
        """Take a step into the figures, and return how they stand.

        Args:
            producer: name of the stage whose drafts were verified.
        """
        stats, seconds = self.stats, (step.computed_ns - step.start_ns) / 1e9
        num_tokens = step.num_missing + step.num_drafts
        if step.is_prefill:
            self.observe_prefill(step.num_missing, seconds)
        else:
            self.observe_step(num_tokens, seconds)
            stats.acceptance_lengths[step.num_emitted] += 1
        num_behind = step.num_missing - (0 if step.is_prefill else 1)
        stats.catch_up_s += seconds * num_behind / num_tokens
        stats.forwards += 1
        stats.busy_s += (step.finished_ns - step.start_ns) / 1e9
        stats.emitted += step.num_emitted
        stats.verified += step.num_drafts
        stats.accepted += step.num_accepted
        if step.num_drafts:
            stats.count_drafts(producer, step.num_drafts, step.num_accepted)
        if self.trace is not None:
            self.trace.append(TraceEvent(step.name, step.start_ns, step.finished_ns, num_tokens, step.num_accepted))
        return Progress(
            stats.forwards,
            stats.emitted,
            stats.verified,
            stats.accepted,
            stats.rollbacks,
            int(1e9 * stats.busy_s),
            int(1e9 * stats.catch_up_s),
        )

    def count_rollback(self, now_ns: int, num_tokens: int) -> None:
        """`num_tokens` of this stage's own were corrected by its consumer."""
        self.stats.rollbacks += 1
        if self.trace is not None:
            self.trace.append(TraceEvent("roll back", now_ns, now_ns, num_tokens, 0))
