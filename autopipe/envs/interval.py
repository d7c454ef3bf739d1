"""What happened in one control interval, as both environments report it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.prompt_kinds import PromptKind

Floats = NDArray[np.float64]


@dataclass(slots=True)
class SlotFigures:
    """Counts by drafter slot, float64 [slots]; the target's come last in the arrays of [slots + 1].

    Attributes:
        proposed, accepted: drafts of the slot that its consumer checked, and of these accepted.
        room: drafts its consumer could have checked: verifications times the slot's window.
        rollbacks: times its consumer corrected it.
        step_s: mean seconds of a step in this interval, prefills left out; 0 where there was none. [slots + 1]
    """

    proposed: Floats
    accepted: Floats
    room: Floats
    rollbacks: Floats
    step_s: Floats

    @classmethod
    def zeros(cls, num_slots: int) -> SlotFigures:
        return cls(
            proposed=np.zeros(num_slots),
            accepted=np.zeros(num_slots),
            room=np.zeros(num_slots),
            rollbacks=np.zeros(num_slots),
            step_s=np.zeros(num_slots + 1),
        )


@dataclass(slots=True)
class DeviceFigures:
    """Telemetry of the target's device; None: not known. Shares run from 0 to 1.

    Attributes:
        power: of the power limit.
        throttled: 1.0 while something slows the device against its will.
    """

    utilisation: float | None = None
    memory: float | None = None
    power: float | None = None
    temperature_c: float | None = None
    throttled: float | None = None


@dataclass(slots=True)
class Interval:
    """One control interval.

    Attributes:
        num_tokens: output tokens.
        decode_tokens, decode_s: of these, tokens after the first block of their request, and the seconds they took.
        plain_s: seconds that plain decoding would have taken for `decode_tokens`.
        ttfts_s: seconds from arrival to first token of the requests whose first token fell into the interval.
        energy_j, plain_energy_j: energy of the interval, and plain decoding's for the same tokens; None: not known.
        position: output tokens of the request under way, of at most `max_new_tokens`.
        context_tokens: prompt and output of the request under way.
        queue: requests that wait.
        kind: of the request under way.
        agreement: by drafter name, share of the interval's positions at which it picked what the target picked, where
            that is known (full information, see DESIGN decision 6); empty where it is not.
        done: the work is done.
        error: why the stream ended without being done.
    """

    num_tokens: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    plain_s: float = 0.0
    ttfts_s: list[float] = field(default_factory=list)
    energy_j: float | None = None
    plain_energy_j: float | None = None
    position: int = 0
    max_new_tokens: int = 1
    context_tokens: int = 0
    queue: int = 0
    kind: PromptKind = PromptKind.OTHER
    slots: SlotFigures = field(default_factory=lambda: SlotFigures.zeros(0))
    device: DeviceFigures = field(default_factory=DeviceFigures)
    agreement: dict[str, float] = field(default_factory=dict)
    done: bool = False
    error: str | None = None

    @property
    def relative_goodput(self) -> float | None:
        """Goodput relative to plain decoding; None when the interval holds nothing but first tokens."""
        return self.plain_s / self.decode_s if self.decode_s > 0 and self.decode_tokens else None

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per token after the first block of a request."""
        return 1e3 * self.decode_s / self.decode_tokens if self.decode_tokens else None
