"""What a user may set about an environment: interval, spaces, averages and the weights of the reward."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError
from autopipe.core.plan import MAX_STAGES, MAX_WINDOW, Mode, WarmupKind

Level = Annotated[int, Field(ge=1, le=MAX_WINDOW)]
MAX_DRAFTERS = MAX_STAGES - 1


class SpaceConfig(UserModel):
    """What fixes the observation and action spaces; two environments with equal settings have equal spaces.

    Attributes:
        drafter_slots: drafters a menu may offer; unused slots are masked and read as missing.
        windows: window levels, the same for every slot.
        min_drafts: levels of the fewest drafts that a verifier waits for (async).
        modes: execution modes; plain decoding is the chain `off`, not a mode.
        warmups: how windows open in the course of a request.
        adapter_slots: adapters a menu may offer beside "none".
    """

    drafter_slots: int = Field(default=3, ge=1, le=MAX_DRAFTERS)
    windows: tuple[Level, ...] = Field(default=(1, 2, 4, 8, 16), min_length=2)
    min_drafts: tuple[Level, ...] = Field(default=(1, 2, 4), min_length=1)
    modes: tuple[Mode, ...] = Field(default=(Mode.LOCKSTEP, Mode.ASYNC), min_length=1)
    warmups: tuple[WarmupKind, ...] = Field(default=tuple(WarmupKind), min_length=1)
    adapter_slots: int = Field(default=1, ge=0, le=8)

    @model_validator(mode="after")
    def _levels_ascend(self) -> SpaceConfig:
        for key in ("windows", "min_drafts"):
            levels = getattr(self, key)
            if list(levels) != sorted(set(levels)):
                raise ConfigError(f"spaces.{key}", levels, "ascending levels, each once")
        if Mode.PLAIN in self.modes or len(set(self.modes)) < len(self.modes):
            raise ConfigError("spaces.modes", [mode.value for mode in self.modes], "lockstep, async, each at most once")
        if len(set(self.warmups)) < len(self.warmups):
            raise ConfigError("spaces.warmups", [kind.value for kind in self.warmups], "each kind at most once")
        return self


class RewardWeights(UserModel):
    """Weights of the reward, all in units of plain decoding's goodput (1.0: plain decoding, 2.0: twice as fast).

    Attributes:
        goodput: of (milliseconds per token of plain decoding) / (milliseconds per token measured).
        energy: of (joules per token) / (joules per token of plain decoding): what saving all the energy of plain
            decoding would be worth. An interval whose energy is not known is not charged.
        latency: of the share of latency targets missed, 0 to 1.
        switch: charged when another chain or adapter is put in force, beside the time that it costs anyway.
        retune: charged when windows, minimum drafts, mode or warm-up change.
        rejected: charged for an action that the mask forbids; the plan in force then stays.
    """

    goodput: float = Field(default=1.0, ge=0)
    energy: float = Field(default=0.05, ge=0)
    latency: float = Field(default=0.25, ge=0)
    switch: float = Field(default=0.05, ge=0)
    retune: float = Field(default=0.01, ge=0)
    rejected: float = Field(default=0.1, ge=0)


class LatencyTargets(UserModel):
    """What the user promised. None: nothing.

    Attributes:
        ttft_s: seconds from arrival to the first token.
        ms_per_token: mean milliseconds per token over a control interval.
    """

    ttft_s: float | None = Field(default=None, gt=0)
    ms_per_token: float | None = Field(default=None, gt=0)


class EnvConfig(UserModel):
    """Settings of both environments.

    Attributes:
        interval_tokens: output tokens of a control step.
        max_steps: control steps after which an episode is truncated.
        fast_intervals, slow_intervals: length of the two running averages, in control steps.
        memory_share: most of a device's memory that models may take; plans beyond are masked.
    """

    interval_tokens: int = Field(default=32, ge=1, le=4096)
    max_steps: int = Field(default=256, ge=1)
    fast_intervals: float = Field(default=2.0, ge=1)
    slow_intervals: float = Field(default=16.0, ge=1)
    memory_share: float = Field(default=0.8, gt=0, le=1)
    spaces: SpaceConfig = SpaceConfig()
    reward: RewardWeights = RewardWeights()
    targets: LatencyTargets = LatencyTargets()
