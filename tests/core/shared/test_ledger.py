"""Figures of one request in a shared engine: by stage, in the order of the chain."""

from __future__ import annotations

from typing import Any

from autopipe.core.request import RequestHandle
from autopipe.core.sampling import SamplingParams
from autopipe.core.shared.ledger import OpenRequest
from autopipe.core.stats import StageStats


def drafter(name: str, producer: str | None = None) -> dict[str, Any]:
    stats = StageStats(name=name, forwards=2, emitted=3, busy_s=0.5)
    if producer is not None:
        stats.count_drafts(producer, 4, 1)
    return stats.to_message()


def served(drafters: list[dict[str, Any]], by: str) -> dict[str, Any]:
    return {
        "request": 1, "ids": [5, 6], "read": 1, "drafts": 3, "accepted": 1, "drafter": by, "finish": None,
        "drafters": drafters,
    }  # fmt: skip


def step(chain: list[str]) -> dict[str, Any]:
    return {"start": 0, "end": 10_000_000, "draft": 4_000_000, "rows": 4, "chain": chain}


def test_stages_come_in_the_order_of_the_chain_whoever_was_heard_of_first() -> None:
    request = OpenRequest(
        RequestHandle(1, [1], SamplingParams(), (), None, False, lambda handle: None), [], StageStats(name="target")
    )
    request.count(step(["a", "b"]), served([drafter("b")], "b"))  # `a` is still reading
    request.count(step(["a", "b"]), served([drafter("a", "ngram"), drafter("b", "a")], "b"))
    request.count(step(["a", "b"]), served([], "ngram"))
    reports = {report.name: report for report in request.reports()}
    assert list(reports) == ["ngram", "a", "b", "target"]
    assert (reports["b"].forwards, reports["b"].emitted, reports["b"].busy_s) == (4, 6, 1.0)
    assert (reports["b"].proposed, reports["b"].accepted) == (6, 2)
    assert (reports["a"].proposed, reports["a"].accepted) == (4, 1)
    assert (reports["ngram"].proposed, reports["ngram"].accepted) == (7, 2)
    assert reports["target"].busy_s == 3 * 0.006
