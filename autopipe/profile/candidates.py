"""The stages a profile measures: the neural stages of a plan, and what of them is the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autopipe.core.plan import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class Candidate:
    """A neural stage of the plan.

    Attributes:
        index: place among the neural stages of the chain.
        measured_as: name of the first stage of the same model; its figures hold for this one too.
    """

    index: int
    name: str
    stage: StagePlan
    measured_as: str

    @property
    def is_first(self) -> bool:
        return self.name == self.measured_as


def candidates(plan: Plan) -> list[Candidate]:
    """The neural stages of a plan, the target last."""
    found: list[Candidate] = []
    for name, stage in zip(plan.names(), plan.chain, strict=True):
        if stage.is_ngram:
            continue
        twin = next((other for other in found if model_of(other.stage) == model_of(stage)), None)
        found.append(Candidate(len(found), name, stage, twin.measured_as if twin else name))
    return found


def model_of(stage: StagePlan) -> dict[str, Any]:
    """What must be equal for two stages to have the same speed and the same picks."""
    return stage.identity()


def pairs(found: list[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
    """Each two stages that may compute at the same time, the upstream one first; equal pairs once."""
    seen = set()
    for place, upstream in enumerate(found):
        for downstream in found[place + 1 :]:
            key = (upstream.measured_as, downstream.measured_as)
            if key not in seen:
                seen.add(key)
                yield upstream, downstream
