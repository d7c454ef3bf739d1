"""How a shared engine divides its target among requests."""

from __future__ import annotations

from pydantic import Field, model_validator

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError


class SharingOptions(UserModel):
    """Nothing here changes what a request answers, only when.

    Attributes:
        max_active: requests whose KV caches are held at once; others wait.
        max_batch: requests that get a token in one step; with more active ones, those served longest ago.
        max_waiting: requests that may wait; one more is refused with `QueueFullError`.
        max_rows: rows of one step at most, drafts and prompts included.
        prefill_rows: prompt tokens read in one step while others are answering: bounds how long they are held up.
        prefill_rows_alone: prompt tokens read in one step while nobody is answering.
        quantum_tokens: output tokens after which an active request gives way to a waiting one.
        prefix_cache: keep the KV of finished requests for others that begin alike.
        cached_sequences: finished requests kept at most.
        kv_bytes: memory of the target's KV caches; None: a quarter of what is available, at least one full context. A
            neural drafter has caches of its own beside these, for as many tokens.
    """

    max_active: int = Field(default=64, ge=1, le=4096)
    max_batch: int = Field(default=32, ge=1, le=256)
    max_waiting: int = Field(default=256, ge=0, le=1_000_000)
    max_rows: int = Field(default=192, ge=1, le=4096)
    prefill_rows: int = Field(default=32, ge=1, le=4096)
    prefill_rows_alone: int = Field(default=128, ge=1, le=4096)
    quantum_tokens: int = Field(default=256, ge=1)
    prefix_cache: bool = True
    cached_sequences: int = Field(default=64, ge=0, le=4096)
    kv_bytes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _leaves_room(self) -> SharingOptions:
        if self.max_rows <= self.max_batch:
            raise ConfigError(
                "max_rows", self.max_rows, f"more than max_batch ({self.max_batch}): prompts need rows too"
            )
        return self
