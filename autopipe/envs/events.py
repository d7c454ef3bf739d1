"""What changes in the course of a scenario, and the conditions that result at a given output token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, model_validator

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError


class _Timed(UserModel):
    """In force from output token `start` of the episode up to (not including) `end`; None: to the end."""

    start: int = Field(ge=0)
    end: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> _Timed:
        if self.end is not None and self.end <= self.start:
            raise ConfigError("events.end", self.end, f"above start ({self.start})")
        return self

    def on(self, token: int) -> bool:
        return token >= self.start and (self.end is None or token < self.end)


class SlowDown(_Timed):
    """A stage's forwards take `factor` times as long: a busy neighbour on its cores or device."""

    type: Literal["slow_down"] = "slow_down"
    stage: str
    factor: float = Field(gt=0, le=100)


class Throttle(_Timed):
    """The whole device slows down by `factor`; telemetry shows it, with its temperature."""

    type: Literal["throttle"] = "throttle"
    factor: float = Field(gt=1, le=100)
    temperature_c: float = Field(default=92.0, ge=0, le=150)


class DrafterDies(_Timed):
    """A drafter is gone; chains with it are masked and, where one is in force, bridged over."""

    type: Literal["drafter_dies"] = "drafter_dies"
    stage: str


class Drift(_Timed):
    """A drafter's agreement moves to `factor` of what it was, evenly from `start` to `end`, and stays there."""

    type: Literal["drift"] = "drift"
    stage: str
    factor: float = Field(ge=0, le=10)


class Contention(_Timed):
    """Stages that compute beside each other slow each other down by `factor` more."""

    type: Literal["contention"] = "contention"
    factor: float = Field(ge=1, le=100)


class MemoryTaken(_Timed):
    """Somebody else takes memory on the device: larger plans no longer fit and are masked."""

    type: Literal["memory_taken"] = "memory_taken"
    memory_gb: float = Field(gt=0)


Event = Annotated[SlowDown | Throttle | DrafterDies | Drift | Contention | MemoryTaken, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What events amount to at one moment.

    Attributes:
        slow_down: factor on a stage's forwards, by stage name (`target` too), device throttling included.
        agreement: factor on a drafter's agreement, by name.
        dead: names of drafters that are gone.
        temperature_c: None: as the load makes it.
    """

    slow_down: dict[str, float] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()
    contention: float = 1.0
    throttled: bool = False
    temperature_c: float | None = None
    memory_taken_gb: float = 0.0


def conditions_at(token: int, events: Sequence[Event], stages: Sequence[str]) -> Conditions:
    """The conditions at output token `token` for the named stages (`target` among them)."""
    slow_down, agreement = dict.fromkeys(stages, 1.0), dict.fromkeys(stages, 1.0)
    dead: set[str] = set()
    contention, memory_gb, temperature_c = 1.0, 0.0, None
    for event in events:
        if isinstance(event, Drift):
            agreement[event.stage] *= 1 + (event.factor - 1) * _progress(event, token)
        elif not event.on(token):
            continue
        elif isinstance(event, SlowDown):
            slow_down[event.stage] *= event.factor
        elif isinstance(event, Throttle):
            slow_down = {name: factor * event.factor for name, factor in slow_down.items()}
            temperature_c = max(event.temperature_c, temperature_c or 0.0)
        elif isinstance(event, DrafterDies):
            dead.add(event.stage)
        elif isinstance(event, Contention):
            contention *= event.factor
        else:
            memory_gb += event.memory_gb
    return Conditions(
        slow_down, agreement, frozenset(dead), contention, temperature_c is not None, temperature_c, memory_gb
    )


DRIFT_GRAIN = 256
"""Output tokens between two steps of a drift."""


def next_change(token: int, events: Sequence[Event]) -> int | None:
    """The first output token after `token` at which conditions change; None: never."""
    ahead: list[int] = []
    for event in events:
        ahead += [time for time in (event.start, event.end) if time is not None and time > token]
        if isinstance(event, Drift) and event.end is not None and event.on(token):
            ahead.append(min(event.end, token + DRIFT_GRAIN - (token - event.start) % DRIFT_GRAIN))
    return min(ahead, default=None)


def _progress(event: Drift, token: int) -> float:
    """How far a drift has come, 0 to 1; one without end happens at once."""
    if token < event.start:
        return 0.0
    return 1.0 if event.end is None else min(1.0, (token - event.start) / (event.end - event.start))
