"""From measured stages, as the simulator takes them, to the pipeline of a scenario: train on one's own machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopipe.core.errors import ConfigError
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.scenario import GIGABYTE, PipelineModel
from autopipe.envs.simulator import LatencyCurve, LocalDrafts, SimStage

_LONG_PROMPT = 512


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What the simulator does not need to know of a stage, but a scenario does."""

    memory_bytes: int = 0
    power_w: float = 0.0
    load_s: float = 0.0


def pipeline_from_stages(
    names: Sequence[str],
    measured: Mapping[PromptKind, Mapping[str, SimStage]],
    *,
    facts: Mapping[str, StageFacts] | None = None,
    contention: float = 1.0,
    wrong_equal: float = 0.0,
    device_memory_bytes: int | None = None,
) -> PipelineModel:
    """The pipeline of measured stages.

    Latencies are those of the first kind; agreement is the mean over each kind's table, and for kinds that were not
    measured the mean over all kinds. An n-gram drafter's is the share of its judged drafts that were right.

    Args:
        names: of the stages, cheapest drafter first, the target last.
        measured: stages by name, for each kind of prompt they were measured on.
        facts: by name.
        contention: factor by which a stage is slower for each other one that computes.

    Raises:
        ConfigError: no kind, fewer than two stages, or a stage that is missing in a kind.
    """
    if not measured:
        raise ConfigError("measured", {}, "stages of at least one kind of prompt")
    if len(names) < 2:
        raise ConfigError("names", list(names), "one or more drafters, and the target")
    for kind, stages in measured.items():
        missing = [name for name in names if name not in stages]
        if missing:
            raise ConfigError(f"measured.{kind.value}", missing, f"all of {', '.join(names)}")
    known = facts or {}
    first = next(iter(measured.values()))
    drafters = []
    for name in names[:-1]:
        agreement = {kind.value: _agreement(stages[name]) for kind, stages in measured.items()}
        agreement.setdefault(PromptKind.OTHER.value, sum(agreement.values()) / len(agreement))
        drafters.append(
            {
                **_stage(first[name], known.get(name, StageFacts())),
                "name": name,
                "ngram": first[name].drafts is not None,
                "agreement": agreement,
                "load_ms": 1e3 * known.get(name, StageFacts()).load_s,
                "switch_ms": 1e3 * first[name].switch_s,
                "rollback_ms": 1e3 * first[name].rollback_s,
            }
        )
    return PipelineModel.parse(
        {
            "target": _stage(first[names[-1]], known.get(names[-1], StageFacts())),
            "drafters": drafters,
            "contention": max(contention, 1.0),
            "wrong_equal": wrong_equal,
            "device_memory_gb": None if device_memory_bytes is None else device_memory_bytes / GIGABYTE,
        }
    )


def _stage(stage: SimStage, facts: StageFacts) -> dict[str, Any]:
    if stage.drafts is not None:  # an n-gram drafter: its time is an overhead of its consumer's step
        ms, prefill_ms, overhead_ms = {1: max(1e3 * stage.overhead_s, 1e-6)}, 0.0, 0.0
    else:
        ms = {count: max(1e3 * seconds, 1e-6) for count, seconds in _points(stage.latency).items()}
        prefill_ms = 1e3 * (stage.prompt_s(_LONG_PROMPT) - stage.prompt_s(1)) / (_LONG_PROMPT - 1)
        overhead_ms = 1e3 * stage.overhead_s
    return {
        "ms": ms,
        "prefill_ms_per_token": max(prefill_ms, 0.0),
        "overhead_ms": overhead_ms,
        "memory_gb": facts.memory_bytes / GIGABYTE,
        "power_w": facts.power_w,
    }


def _points(curve: LatencyCurve) -> dict[int, float]:
    """Points of a curve that goes through 1 and, where it has steps, through every step's two ends."""
    counts = {1, *curve.points}
    if not curve.interpolate:
        counts |= {count - 1 for count in curve.points if count > 1}
    return {count: curve.seconds(count) for count in sorted(counts)}


def _agreement(stage: SimStage) -> float:
    if stage.drafts is not None:
        return _judged_right(stage.drafts)
    return stage.agreement if stage.table is None else float(stage.table.mean())


def _judged_right(drafts: LocalDrafts) -> float:
    """Right drafts to those up to the first wrong one: what comes behind it is never judged."""
    judged = float((drafts.right + (drafts.right < drafts.length)).sum())
    return float(drafts.right.sum()) / judged if judged else 0.0
