"""What the journal holds of one request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from autopipe.core.sampling import SamplingParams


class Status(StrEnum):
    """How far a request has come."""

    RUNNING = "running"
    """Accepted, not over. After a crash: to be continued."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    """By its client; asked for again, it goes on."""
    FAILED = "failed"
    """With an error; asked for again, it goes on."""


@dataclass(slots=True)
class Record:
    """One request under its idempotency key.

    Attributes:
        target: what must be equal for a continuation to be identical: the target's identity, as JSON.
        token_ids: output so far, as persisted.
        reason: finish reason, or the error in words.
        created_s, updated_s: seconds since the epoch.
    """

    key: str
    prompt: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    target: str
    status: Status = Status.RUNNING
    reason: str = ""
    token_ids: list[int] = field(default_factory=list)
    created_s: float = 0.0
    updated_s: float = 0.0

    @property
    def fingerprint(self) -> str:
        """Of what was asked for: two requests with one key must have the same."""
        return fingerprint(self.prompt, self.params, self.eos_token_ids)


def fingerprint(prompt: Sequence[int], params: SamplingParams, eos_token_ids: Sequence[int]) -> str:
    """A hash of a request's prompt and options."""
    asked = [list(prompt), params.model_dump(mode="json"), sorted(eos_token_ids)]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
