"""One request as the shared engine keeps it: its handle, and figures made of what the worker says of each step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from autopipe.core.channel import Message
from autopipe.core.request import Outcome, RequestHandle
from autopipe.core.stats import RequestStats, StageReport, StageStats, report_stages
from autopipe.core.trace import TraceEvent


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request that is not over.

    Attributes:
        output: tokens it had been given before it came here (a continuation).
        sent: whether the worker knows of it.
        losses: workers that died while they knew of it.
        stats: of the target, for this request. A step's seconds are shared out by rows.
        drafters: likewise of neural drafters, by name.
        chain: names of those that drafted last, cheapest first.
    """

    handle: RequestHandle
    output: list[int]
    stats: StageStats
    drafters: dict[str, StageStats] = field(default_factory=dict)
    chain: list[str] = field(default_factory=list)
    sent: bool = False
    losses: int = 0
    events: list[TraceEvent] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    plan_changes: int = 0

    @property
    def begun(self) -> bool:
        """Whether the worker has computed anything for it."""
        return self.handle.begun_s is not None

    def begin_message(self) -> Message:
        handle = self.handle
        return {
            "type": "begin",
            "request": handle.id,
            "prompt": list(handle.prompt),
            "output": self.output,
            "params": handle.params.model_dump(mode="json"),
            "eos": list(handle.eos_token_ids),
            "processor": handle.processor is not None,
        }

    def count(self, step: Message, served: Message) -> None:
        """Take what a step did for this request into its figures."""
        if self.handle.begun_s is None:
            self.handle.begun_s = step["start"] / 1e9
        stats, rows = self.stats, served["read"] + served["drafts"]
        share_s = (step["end"] - step["start"] - step["draft"]) / 1e9 * rows / max(1, step["rows"])
        num_tokens = len(served["ids"])
        stats.forwards += 1
        stats.emitted += num_tokens
        stats.busy_s += share_s
        stats.verified += served["drafts"]
        stats.accepted += served["accepted"]
        name = "verify" if served["drafts"] else "decode"
        if served["read"] > 1:
            name = "prefill"
            stats.catch_up_s += share_s * (served["read"] - bool(num_tokens)) / rows
        else:
            stats.acceptance_lengths[num_tokens] += 1
        self.chain = step["chain"]
        if served["drafts"]:
            stats.count_drafts(served["drafter"], served["drafts"], served["accepted"])
        for done in map(StageStats.from_message, served.get("drafters", ())):
            self.drafters.setdefault(done.name, StageStats(name=done.name)).add(done)
        if self.handle.trace:
            self.events.append(TraceEvent(name, step["start"], step["end"], rows, served["accepted"]))

    def reports(self) -> list[StageReport]:
        """Its stages so far."""
        names = sorted(self.drafters, key=lambda name: self.chain.index(name) if name in self.chain else -1)
        return report_stages([*(self.drafters[name] for name in names), self.stats])

    def outcome(self, finish_reason: str) -> Outcome:
        """How it ended, now."""
        handle, now = self.handle, time.monotonic()
        begun = handle.begun_s if handle.begun_s is not None else now
        end = handle.last_token_s or now
        first, lengths = handle.first_token_s, self.stats.acceptance_lengths
        self.stats.waiting_s = max(0.0, end - begun - self.stats.busy_s)
        per_token_s: float | None = None
        if first is not None:
            per_token_s = (end - first) / (handle.num_tokens - 1) if handle.num_tokens > 1 else first - begun
        count = sum(lengths.values())
        stats = RequestStats(
            total_s=end - handle.submitted_s,
            queued_s=begun - handle.submitted_s,
            ttft_s=None if first is None else first - handle.submitted_s,
            ms_per_token=None if per_token_s is None else 1e3 * per_token_s,
            acceptance_length=sum(n * times for n, times in lengths.items()) / count if count else None,
            acceptance_histogram=dict(sorted(lengths.items())),
            stages=self.reports(),
            fallbacks=self.fallbacks,
            plan_changes=self.plan_changes,
        )
        return Outcome(finish_reason, stats, {self.stats.name: self.events} if handle.trace else {})
