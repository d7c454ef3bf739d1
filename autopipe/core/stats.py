"""What a request did, by stage: counted in the workers, merged by the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class StageStats:
    """Counters of one stage over one request.

    Attributes:
        forwards: forward passes, prefill included.
        emitted: tokens this stage appended to its sequence by computing (accepted drafts and its own).
        verified: drafts of the stage before it that it checked in a forward.
        accepted: of these, accepted.
        acceptance_lengths: tokens emitted per verification (bonus included) -> how often.
        rollbacks: times its consumer corrected it.
        busy_s: seconds in forwards and picking, catching up included.
        catch_up_s: of these, seconds spent on prompt and on tokens it had fallen behind.
        overhead_s: seconds in which it had work, but was not computing.
        waiting_s: seconds without work.
        bytes_out: bytes published to its neighbours.
    """

    name: str = ""
    forwards: int = 0
    emitted: int = 0
    verified: int = 0
    accepted: int = 0
    acceptance_lengths: Counter[int] = field(default_factory=Counter)
    rollbacks: int = 0
    busy_s: float = 0.0
    catch_up_s: float = 0.0
    overhead_s: float = 0.0
    waiting_s: float = 0.0
    bytes_out: int = 0

    def to_message(self) -> dict[str, Any]:
        data = asdict(self)
        data["acceptance_lengths"] = list(self.acceptance_lengths.items())
        return data

    @classmethod
    def from_message(cls, data: dict[str, Any]) -> StageStats:
        lengths = Counter({int(length): int(count) for length, count in data["acceptance_lengths"]})
        return cls(**{**data, "acceptance_lengths": lengths})


@dataclass(slots=True)
class StageReport:
    """One stage as users see it; `proposed` and `accepted` are of its own drafts, as its consumer judged them."""

    name: str
    forwards: int
    proposed: int
    accepted: int
    acceptance_rate: float | None
    emitted: int
    rollbacks: int
    busy_s: float
    waiting_s: float
    catch_up_s: float
    overhead_s: float
    bytes_out: int


@dataclass(slots=True)
class RequestStats:
    """One request as users see it.

    Attributes:
        total_s: from submission to the last token.
        queued_s: of these, spent waiting for earlier requests or for the engine to be ready.
        ttft_s: from submission to the first token.
        ms_per_token: milliseconds per output token after the first (of the first, if it is the only one).
        acceptance_length: output tokens per verification by the target, bonus included.
        acceptance_histogram: tokens per verification -> how often.
        stages: in chain order, the target last.
        fallbacks: what did not go as planned (a stage that died, a chain cut short), in words.
        plan_changes: plans applied while the request ran.
    """

    total_s: float = 0.0
    queued_s: float = 0.0
    ttft_s: float | None = None
    ms_per_token: float | None = None
    acceptance_length: float | None = None
    acceptance_histogram: dict[int, int] = field(default_factory=dict)
    stages: list[StageReport] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    plan_changes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def report_stages(chain: list[StageStats], ngram_first: bool) -> list[StageReport]:
    """Turn consumers' counts into a report by producer.

    Args:
        chain: stages with a process of their own, in chain order, the target last.
        ngram_first: whether an n-gram drafter feeds the first of them.
    """
    reports = []
    if ngram_first:
        first = chain[0]
        reports.append(
            StageReport(
                "ngram",
                0,
                first.verified,
                first.accepted,
                _rate(first),
                first.verified,
                0,
                0.0,
                0.0,
                0.0,
                0.0,
                0,
            )
        )
    for index, stage in enumerate(chain):
        consumer = chain[index + 1] if index + 1 < len(chain) else None
        reports.append(
            StageReport(
                name=stage.name,
                forwards=stage.forwards,
                proposed=consumer.verified if consumer else 0,
                accepted=consumer.accepted if consumer else 0,
                acceptance_rate=_rate(consumer) if consumer else None,
                emitted=stage.emitted,
                rollbacks=stage.rollbacks,
                busy_s=stage.busy_s,
                waiting_s=stage.waiting_s,
                catch_up_s=stage.catch_up_s,
                overhead_s=stage.overhead_s,
                bytes_out=stage.bytes_out,
            )
        )
    return reports


def _rate(consumer: StageStats) -> float | None:
    return consumer.accepted / consumer.verified if consumer.verified else None
