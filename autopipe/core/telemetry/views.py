"""What `autopipe top` shows of a pipeline. What is not known is None."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageView:
    """What is shown of one stage. Rates and means are of the last seconds.

    Attributes:
        acceptance_rate: accepted to proposed drafts of this stage, 0 to 1.
        window: most tokens it may be ahead of its consumer; None for the target.
        window_fill: its drafts that the consumer checks in one forward.
        busy_share: share of time it computes.
        step_ms: mean time of a forward, prefill and catching up left out.
        num_rollbacks: in the request under way.
    """

    name: str
    device: str | None = None
    acceptance_rate: float | None = None
    window: int | None = None
    window_fill: float | None = None
    busy_share: float | None = None
    step_ms: float | None = None
    num_rollbacks: int | None = None


@dataclass(frozen=True, slots=True)
class PipelineView:
    """What is shown of the pipeline: stages, cheapest drafter first.

    Attributes:
        plan: the chain in words.
        pid: process that runs it.
        age_s: seconds since it was loaded.
        silent_s: seconds since it last said something.
        busy: whether a request is under way.
        tokens_per_s: output tokens per second, over the last seconds.
        acceptance_length: tokens emitted per verification of the target, bonus included, over the last seconds.
        num_tokens: output tokens since it was loaded.
        num_waiting: requests that wait for their turn.
        j_per_token: joules of all devices per output token; None where there is no energy counter.
    """

    mode: str
    stages: tuple[StageView, ...] = ()
    tokens_per_s: float | None = None
    acceptance_length: float | None = None
    num_tokens: int | None = None
    num_waiting: int | None = None
    j_per_token: float | None = None
    plan: str = ""
    pid: int | None = None
    age_s: float | None = None
    silent_s: float | None = None
    busy: bool | None = None
