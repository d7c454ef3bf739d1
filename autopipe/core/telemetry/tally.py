"""What the stages of a running engine do, over the last seconds: from what they show of the request under way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopipe.core.live_engine import RunningEngine
from autopipe.core.plan import Plan, StagePlan
from autopipe.core.stats import StageReport
from autopipe.core.telemetry.views import PipelineView, StageView

WINDOW_S = 2.0
"""Rates are over so many seconds."""


class _Counts(NamedTuple):
    """Counters of one stage; differences and sums go field by field."""

    forwards: float = 0
    steps_s: float = 0.0
    busy_s: float = 0.0
    emitted: float = 0
    proposed: float = 0
    accepted: float = 0

    def plus(self, other: _Counts) -> _Counts:
        return _Counts(*(a + b for a, b in zip(self, other, strict=True)))

    def since(self, other: _Counts) -> _Counts:
        return _Counts(*(max(a - b, 0) for a, b in zip(self, other, strict=True)))


class _Moment(NamedTuple):
    time_s: float
    num_tokens: int
    stages: dict[str, _Counts]


class Tally:
    """Looks at an engine now and then and says what its stages did in between.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._request: int | None = None
        self._heard: dict[str, StageReport] = {}
        self._totals: dict[str, _Counts] = {}
        self._moments: deque[_Moment] = deque()

    def look(self, engine: RunningEngine) -> PipelineView:
        """How things stand; rates are over the time since a look `WINDOW_S` ago."""
        plan, progress = engine.plan, engine.progress()
        if progress is not None:
            self._count(*progress)
        now_s = self._now()
        self._moments.append(_Moment(now_s, engine.num_tokens, dict(self._totals)))
        while len(self._moments) > 2 and self._moments[1].time_s <= now_s - WINDOW_S:
            self._moments.popleft()
        before, after = self._moments[0], self._moments[-1]
        seconds = after.time_s - before.time_s
        done = {name: counts.since(before.stages.get(name, _Counts())) for name, counts in after.stages.items()}
        names = plan.names()
        target = done.get(names[-1], _Counts())
        return PipelineView(
            mode=plan.mode.value,
            plan=describe_chain(plan),
            stages=tuple(self._stage(plan, place, done, seconds) for place in range(len(names))),
            tokens_per_s=(after.num_tokens - before.num_tokens) / seconds if seconds > 0 else None,
            acceptance_length=target.emitted / target.forwards if target.forwards > 0 else None,
            num_tokens=after.num_tokens,
            num_waiting=engine.num_waiting,
            busy=progress is not None,
        )

    def _count(self, request: int, reports: Sequence[StageReport]) -> None:
        """Add what stages have done in a request since they were last heard of."""
        if request != self._request:
            self._request, self._heard = request, {}
        for report in reports:
            before = self._heard.get(report.name)
            if before is not None and before.forwards <= report.forwards:
                new = _counts(report).since(_counts(before))
            else:  # its first forward is the prompt's
                new = _counts(report)._replace(forwards=max(report.forwards - 1, 0))
            self._totals[report.name] = self._totals.get(report.name, _Counts()).plus(new)
            self._heard[report.name] = report

    def _stage(self, plan: Plan, place: int, done: dict[str, _Counts], seconds: float) -> StageView:
        names, stage = plan.names(), plan.chain[place]
        own = done.get(names[place], _Counts())
        is_target = place == len(names) - 1
        consumer = _Counts() if is_target else done.get(names[place + 1], _Counts())
        heard = self._heard.get(names[place])
        return StageView(
            name=names[place],
            device=_device(stage),
            acceptance_rate=own.accepted / own.proposed if own.proposed > 0 else None,
            window=None if is_target else stage.window,
            window_fill=own.proposed / consumer.forwards if consumer.forwards > 0 else None,
            busy_share=None if stage.is_ngram or seconds <= 0 else min(own.busy_s / seconds, 1.0),
            step_ms=1e3 * own.steps_s / own.forwards if own.forwards > 0 else None,
            num_rollbacks=None if heard is None or is_target else heard.rollbacks,
        )


def describe_chain(plan: Plan) -> str:
    """A plan in a few words: `lockstep: ngram 7 > smollm2-135m`."""
    drafters = [f"{name} {stage.window}" for name, stage in zip(plan.names(), plan.drafters, strict=False)]
    return f"{plan.mode.value}: {' > '.join([*drafters, plan.names()[-1]])}"


def _counts(report: StageReport) -> _Counts:
    steps_s = report.busy_s - report.catch_up_s
    return _Counts(report.forwards, steps_s, report.busy_s, report.emitted, report.proposed, report.accepted)


def _device(stage: StagePlan) -> str:
    return "cpu" if stage.is_ngram or stage.is_emulated else stage.device
