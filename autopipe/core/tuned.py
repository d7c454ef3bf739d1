"""What a tuned plan says of its own making: where, for what, and what was expected of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autopipe.core.config import UserModel

Count = Annotated[int, Field(ge=0)]


class Machine(UserModel):
    """Where something was measured. `fingerprint` is a hash of the other fields."""

    fingerprint: str
    platform: str
    cpu: str | None
    cores: Count
    memory_bytes: Count
    gpus: tuple[str, ...]
    libraries: dict[str, str | None]


class Tuned(UserModel):
    """Where and for what `autopipe tune` chose a plan. Has no effect on how the plan runs.

    Attributes:
        created_at: when, ISO 8601. version: of AutoPipe.
        objective: what was to be best. workload: prompt sets it was chosen on.
        machine: where; another one warns when the plan is loaded.
        predicted, measured: figures by name (ms_per_token, speedup, ttft_ms, ...); null where there is none.
    """

    created_at: str
    version: str
    objective: str
    workload: tuple[str, ...]
    machine: Machine
    predicted: dict[str, float | None] = Field(default_factory=dict)
    measured: dict[str, float | None] = Field(default_factory=dict)
