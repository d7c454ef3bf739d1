"""Domain randomisation: scenarios near a given one, so that a policy does not learn one machine by heart."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from pydantic import Field

from autopipe.core.config import UserModel
from autopipe.envs.events import Drift, Event, SlowDown
from autopipe.envs.scenario import Agreement, DrafterModel, Phase, Scenario, StageModel

Stage = TypeVar("Stage", bound=StageModel)


class Randomisation(UserModel):
    """How far an episode departs from its scenario; each figure is the standard deviation of a factor's logarithm
    (of the log-odds, for agreement), so 0.3 is roughly +-30%, and 0 nothing.

    Attributes:
        latency: of each stage's speed.
        slope: of what more tokens in a forward cost.
        agreement: of every drafter's agreement on every kind of prompt.
        contention: of how much stages slow each other down.
        load: of the rate of arriving requests.
        timing: of when events begin and end, and phases change.
        severity: of how much events slow things down or change agreement.
    """

    latency: float = Field(default=0.0, ge=0, le=2)
    slope: float = Field(default=0.0, ge=0, le=2)
    agreement: float = Field(default=0.0, ge=0, le=3)
    contention: float = Field(default=0.0, ge=0, le=2)
    load: float = Field(default=0.0, ge=0, le=2)
    timing: float = Field(default=0.0, ge=0, le=1)
    severity: float = Field(default=0.0, ge=0, le=1)

    @classmethod
    def for_training(cls) -> Randomisation:
        """What the shipped policy was trained with."""
        return cls(latency=0.4, slope=0.3, agreement=0.5, contention=0.3, load=0.4, timing=0.2, severity=0.3)


def randomise(scenario: Scenario, spread: Randomisation, rng: np.random.Generator) -> Scenario:
    """A scenario near `scenario`; a function of `rng`'s state. Its work keeps its total number of tokens only
    with `timing` 0."""
    if spread == Randomisation():
        return scenario
    draw = _Draw(rng)
    pipeline = scenario.pipeline
    contention = 1 + (pipeline.contention - 1) * draw.factor(spread.contention)
    changed = pipeline.model_copy(
        update={
            "target": _stage(pipeline.target, spread, draw),
            "drafters": tuple(_drafter(drafter, spread, draw) for drafter in pipeline.drafters),
            "contention": contention,
        }
    )
    stretch = draw.factor(spread.timing)
    return scenario.model_copy(
        update={
            "pipeline": changed,
            "phases": tuple(_phase(phase, spread, stretch, draw) for phase in scenario.phases),
            "events": tuple(_event(event, spread, stretch, draw) for event in scenario.events),
        }
    )


class _Draw:
    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def factor(self, spread: float) -> float:
        """A positive factor around 1."""
        return math.exp(spread * float(self._rng.standard_normal()))

    def share(self, share: float, spread: float) -> float:
        """A share around `share`; 0 and 1 stay."""
        noise = spread * float(self._rng.standard_normal())
        if noise == 0 or not 0 < share < 1:
            return share
        return 1 / (1 + math.exp(-(math.log(share / (1 - share)) + noise)))


def _stage(stage: Stage, spread: Randomisation, draw: _Draw) -> Stage:
    speed, slope = draw.factor(spread.latency), draw.factor(spread.slope)
    single = stage.ms[min(stage.ms)]
    ms = {n: speed * (single + (value - single) * slope) for n, value in stage.ms.items()}
    return stage.model_copy(update={"ms": ms, "prefill_ms_per_token": speed * stage.prefill_ms_per_token})


def _drafter(drafter: DrafterModel, spread: Randomisation, draw: _Draw) -> DrafterModel:
    def table(agreement: Agreement) -> Agreement:
        return {kind: draw.share(value, spread.agreement) for kind, value in agreement.items()}

    adapters = {name: table(agreement) for name, agreement in drafter.adapters.items()}
    changed = drafter.model_copy(update={"agreement": table(drafter.agreement), "adapters": adapters})
    return _stage(changed, spread, draw)


def _phase(phase: Phase, spread: Randomisation, stretch: float, draw: _Draw) -> Phase:
    rate = phase.arrivals_per_s
    load = draw.factor(spread.load)
    return phase.model_copy(
        update={
            "tokens": max(1, round(phase.tokens * stretch)),
            "arrivals_per_s": None if rate is None else rate * load,
        }
    )


def _event(event: Event, spread: Randomisation, stretch: float, draw: _Draw) -> Event:
    start, length = event.start, None if event.end is None else event.end - event.start
    start = round(start * stretch * draw.factor(spread.timing))
    end = None if length is None else start + max(1, round(length * stretch))
    changes: dict[str, object] = {"start": start, "end": end}
    power = draw.factor(spread.severity)
    if isinstance(event, SlowDown | Drift) and event.factor > 0:
        changes["factor"] = event.factor**power
    return event.model_copy(update=changes)
