"""What a request did, by stage: counted in the workers, merged by the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.core.board import Slot
    from autopipe.core.telemetry.energy import EnergyUse
    from autopipe.core.telemetry.use import DeviceUse

NGRAM = "ngram"
"""What stats call an n-gram drafter."""


@dataclass(slots=True)
class StageStats:
    """Counters of one stage over one request.

    Attributes:
        forwards: forward passes, prefill included.
        emitted: tokens this stage appended to its sequence by computing (accepted drafts and its own).
        verified: drafts of the stage before it that it checked in a forward.
        accepted: of these, accepted.
        drafts_from: name of a stage before it -> [its drafts verified, of these accepted].
        acceptance_lengths: tokens emitted per verification (bonus included) -> how often.
        rollbacks: times its consumer corrected it.
        busy_s: seconds in forwards and picking, catching up included.
        catch_up_s: of these, seconds spent on prompt and on tokens it had fallen behind.
        overhead_s: seconds in which it had work, but was not computing.
        waiting_s: seconds without work.
        bytes_out: bytes published to its neighbours.
        resend_bytes: what sending the whole sequence each time would have been.
        vocabulary_bytes: what sending each of its draft distributions over the whole vocabulary would have been
            (rejection sampling; 0 else).
        kv_moved_bytes: keys and values copied because layers moved to other devices; kv_resend_bytes: what copying all
            of these layers' each time would have been.
    """

    name: str = ""
    forwards: int = 0
    emitted: int = 0
    verified: int = 0
    accepted: int = 0
    drafts_from: dict[str, list[int]] = field(default_factory=dict)
    acceptance_lengths: Counter[int] = field(default_factory=Counter)
    rollbacks: int = 0
    busy_s: float = 0.0
    catch_up_s: float = 0.0
    overhead_s: float = 0.0
    waiting_s: float = 0.0
    bytes_out: int = 0
    resend_bytes: int = 0
    vocabulary_bytes: int = 0
    kv_moved_bytes: int = 0
    kv_resend_bytes: int = 0

    def count_drafts(self, producer: str, verified: int, accepted: int) -> None:
        """Note a verification of drafts by the stage called `producer`."""
        counts = self.drafts_from.setdefault(producer, [0, 0])
        counts[0] += verified
        counts[1] += accepted

    def add(self, more: StageStats) -> None:
        """Take in what the same stage has done since."""
        for name in (each.name for each in fields(self)):
            value = getattr(more, name)
            if isinstance(value, (int, float)):
                setattr(self, name, getattr(self, name) + value)
        self.acceptance_lengths.update(more.acceptance_lengths)
        for producer, counts in more.drafts_from.items():
            self.count_drafts(producer, *counts)

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
    """One stage as users see it; `proposed` and `accepted` are of its own drafts, as its consumers judged them.

    Attributes:
        acceptance_histogram: tokens it emitted per verification -> how often.
        bytes_out: that it sent to its neighbours.
        naive_bytes: what sending the whole sequence, and whole distributions where any travel, would have been.
        bytes_per_token, naive_bytes_per_token: the same for each token it emitted; None if it emitted none.
        bytes_saved: share of naive_bytes that did not travel, 0 to 1; None if there were none.
        kv_moved_bytes: keys and values that followed its layers to other devices; kv_resend_bytes: all there were.
    """

    name: str
    forwards: int = 0
    proposed: int = 0
    accepted: int = 0
    acceptance_rate: float | None = None
    acceptance_histogram: dict[int, int] = field(default_factory=dict)
    emitted: int = 0
    rollbacks: int = 0
    busy_s: float = 0.0
    waiting_s: float = 0.0
    catch_up_s: float = 0.0
    overhead_s: float = 0.0
    bytes_out: int = 0
    naive_bytes: int = 0
    bytes_per_token: float | None = None
    naive_bytes_per_token: float | None = None
    bytes_saved: float | None = None
    kv_moved_bytes: int = 0
    kv_resend_bytes: int = 0

    def rate_link(self) -> None:
        """Fill in the figures that follow from bytes_out, naive_bytes and emitted."""
        if self.emitted:
            self.bytes_per_token = self.bytes_out / self.emitted
            self.naive_bytes_per_token = self.naive_bytes / self.emitted
        if self.naive_bytes:
            self.bytes_saved = 1 - self.bytes_out / self.naive_bytes


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
        energy: of all devices from the request's start to its last token; None without telemetry.
        devices: what they did in that time; None without telemetry.
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
    energy: EnergyUse | None = None
    devices: tuple[DeviceUse, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `energy` and `devices` are null without telemetry."""
        return {
            **asdict(replace(self, energy=None, devices=None)),
            "energy": None if self.energy is None else self.energy.to_dict(),
            "devices": None if self.devices is None else [device.to_dict() for device in self.devices],
        }


def report_stages(chain: list[StageStats]) -> list[StageReport]:
    """Turn consumers' counts into a report by producer.

    Args:
        chain: stages with a process of their own that took part, cheapest first, the target last.
    """
    judged: dict[str, list[int]] = {}
    for stage in chain:
        for name, counts in stage.drafts_from.items():
            total = judged.setdefault(name, [0, 0])
            total[0], total[1] = total[0] + counts[0], total[1] + counts[1]
    reports = [StageReport(NGRAM, emitted=judged[NGRAM][0])] if NGRAM in judged else []
    for stage in chain:
        reports.append(
            StageReport(
                name=stage.name,
                forwards=stage.forwards,
                acceptance_histogram=dict(sorted(stage.acceptance_lengths.items())),
                emitted=stage.emitted,
                rollbacks=stage.rollbacks,
                busy_s=stage.busy_s,
                waiting_s=stage.waiting_s,
                catch_up_s=stage.catch_up_s,
                overhead_s=stage.overhead_s,
                bytes_out=stage.bytes_out,
                naive_bytes=stage.resend_bytes + stage.vocabulary_bytes,
                kv_moved_bytes=stage.kv_moved_bytes,
                kv_resend_bytes=stage.kv_resend_bytes,
            )
        )
        reports[-1].rate_link()
    for report in reports:
        report.proposed, report.accepted = judged.get(report.name, [0, 0])
        report.acceptance_rate = report.accepted / report.proposed if report.proposed else None
    return reports


def progress_stats(slot: Slot, name: str, request: int) -> StageStats | None:
    """What a stage has done so far in a request, as it shows it on the board; None before its first step."""
    done = slot.read_progress(request)
    if done is None:
        return None
    return StageStats(
        name=name,
        forwards=done.forwards,
        emitted=done.emitted,
        verified=done.verified,
        accepted=done.accepted,
        rollbacks=done.rollbacks,
        busy_s=done.busy_ns / 1e9,
        catch_up_s=done.catch_up_ns / 1e9,
    )
