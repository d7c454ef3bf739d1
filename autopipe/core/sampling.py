"""How a token is chosen from logits: the user's options."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError


class SamplingParams(UserModel):
    """Options of one request; names and meanings as in transformers and the OpenAI API.

    Attributes:
        temperature: 0 is greedy; else 1e-6 to 100 (below, float32 logits overflow).
        top_k: keep the k likeliest tokens; None or 0: all.
        top_p: keep the smallest set of likeliest tokens with at least this probability.
        min_p: drop tokens less likely than this share of the likeliest.
        repetition_penalty: divides (multiplies, if negative) logits of tokens in prompt and output; 1: none.
        frequency_penalty: subtracted per occurrence in the output (OpenAI).
        presence_penalty: subtracted once for tokens in the output (OpenAI).
        logit_bias: token id -> value added to its logit.
        min_new_tokens: eos cannot be chosen before this many output tokens; at most max_new_tokens.
        max_new_tokens: exact upper bound of output tokens.
        eos_token_ids: ids that end the output (the eos itself is the last token id); None: the model's own.
        stop: strings that end the output; the text is cut before them.
        seed: of the sampling noise.
        num_logprobs: None: no log-probabilities; 0: of the chosen tokens; n: and of the n likeliest at each position.
    """

    temperature: float = Field(default=0.0, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[int, float] = Field(default_factory=dict)
    min_new_tokens: int = Field(default=0, ge=0)
    max_new_tokens: int = Field(default=256, ge=1)
    eos_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    seed: int = Field(default=0, ge=0, lt=2**63)
    num_logprobs: int | None = Field(default=None, ge=0, le=20)

    @field_validator("temperature")
    @classmethod
    def _not_overflowing(cls, value: float) -> float:
        if 0 < value < 1e-6:
            raise ValueError("0 (greedy), or 1e-6 to 100")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("stop strings of at least one character")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> SamplingParams:
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError("min_new_tokens", self.min_new_tokens, f"0 to max_new_tokens ({self.max_new_tokens})")
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
