"""What a generation gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopipe.core.plan import Plan
from autopipe.core.stats import RequestStats


@dataclass(slots=True)
class GenerationResult:
    """One finished generation.

    Attributes:
        text: the output, special tokens left out, cut before a stop string.
        token_ids: the output tokens; when a stop string ended it, up to the token that completed the string.
        finish_reason: `stop` (eos or stop string), `length` (max_new_tokens) or `cancelled`.
        prompt_ids: the prompt as the target saw it.
        logprobs: per output token, where asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_ids: list[int]
    logprobs: list[Any] | None
    stats: RequestStats
    plan: Plan

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and output in one list of one row, as `model.generate` returns them."""
        return [self.prompt_ids + self.token_ids]

    def to_dict(self) -> dict[str, Any]:
        """The object that `autopipe run --json` prints."""
        data: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids)},
            "plan": self.plan.model_dump(mode="json", exclude_defaults=True),
            "stats": self.stats.to_dict(),
        }
        if self.logprobs is not None:
            data["logprobs"] = self.logprobs
        return data


@dataclass(slots=True)
class StreamDelta:
    """What one step added. The last has a `finish_reason` and the whole `result`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    result: GenerationResult | None = None
