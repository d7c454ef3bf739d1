"""What stages have done since the service began, requests under way included."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopipe.core.stats import StageReport


@dataclass(slots=True)
class StageTotal:
    """Sums of one stage; meanings as in `StageReport`. `verifications`: tokens emitted per forward -> how often."""

    forwards: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    rollbacks: int = 0
    busy_s: float = 0.0
    verifications: Counter[int] = field(default_factory=Counter)

    def add(self, report: StageReport) -> None:
        self.forwards += report.forwards
        self.proposed += report.proposed
        self.accepted += report.accepted
        self.emitted += report.emitted
        self.rollbacks += report.rollbacks
        self.busy_s += report.busy_s
        self.verifications.update(report.acceptance_histogram)

    def since(self, before: StageTotal | None) -> StageTotal:
        """What came after `before`, never negative: a stage that died takes figures of a request with it."""
        old = before or StageTotal()
        return StageTotal(
            forwards=max(self.forwards - old.forwards, 0),
            proposed=max(self.proposed - old.proposed, 0),
            accepted=max(self.accepted - old.accepted, 0),
            emitted=max(self.emitted - old.emitted, 0),
            rollbacks=max(self.rollbacks - old.rollbacks, 0),
            busy_s=max(self.busy_s - old.busy_s, 0.0),
        )

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None


class StageTotals:
    """Sums by stage name, fed with finished requests; any thread may use it."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._finished: dict[str, StageTotal] = {}
        self._counted: dict[int, None] = {}  # requests whose progress may still be shown, though they are counted

    def count(self, request: int, reports: Iterable[StageReport]) -> None:
        """Take a finished request in, once: with a journal several clients may wait for the same one."""
        with self._gate:
            if request in self._counted:
                return
            for report in reports:
                self._finished.setdefault(report.name, StageTotal()).add(report)
                self._counted[request] = None
            while len(self._counted) > 1024:
                del self._counted[next(iter(self._counted))]

    def finished(self) -> dict[str, StageTotal]:
        """Sums over finished requests: these only ever grow."""
        with self._gate:
            return {name: _copy(total) for name, total in self._finished.items()}

    def now(self, progress: Mapping[int, list[StageReport]]) -> dict[str, StageTotal]:
        """Sums with the requests under way, as their progress shows them."""
        with self._gate:
            totals = {name: _copy(total) for name, total in self._finished.items()}
            for request, reports in progress.items():
                if request not in self._counted:
                    for report in reports:
                        totals.setdefault(report.name, StageTotal()).add(report)
        return totals


def _copy(total: StageTotal) -> StageTotal:
    return replace(total, verifications=total.verifications.copy())
