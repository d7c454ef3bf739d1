"""What a live controller reports: every decision with its reason, what it promised and what came of it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class EventKind(StrEnum):
    """`plan`: another plan is in force. `outcome`: what came of it, under the same number. `rejected`: the engine could
    not put a plan in force. `floor`: goodput fell below the floor. `policy-failed`: the policy raised and was replaced.
    `calibrated`: plain decoding was measured. `stopped`: the controller has ended."""

    PLAN = "plan"
    OUTCOME = "outcome"
    REJECTED = "rejected"
    FLOOR = "floor"
    POLICY_FAILED = "policy-failed"
    CALIBRATED = "calibrated"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class PolicyEvent:
    """One entry of a controller's log.

    Attributes:
        number: of the change of plan; an `outcome` has that of its `plan`.
        reason: in words.
        old_plan, new_plan: in words, as `ActionCodec.describe` puts them.
        predicted_gain, observed_gain: goodput of the new plan relative to the old one's, minus 1; None: not known.
        time_s: seconds since the epoch.
    """

    kind: EventKind
    policy: str
    reason: str
    old_plan: str
    new_plan: str
    number: int = 0
    predicted_gain: float | None = None
    observed_gain: float | None = None
    time_s: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "kind": self.kind.value}
