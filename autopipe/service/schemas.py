"""Requests as clients write them: OpenAI's fields, and some of vLLM's.

Fields that cannot change the output are taken and have no effect; those that would change it and are not supported
are refused, unless they hold their neutral value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from autopipe.core.config import UserModel

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Text = Annotated[str, Field(min_length=1)]

UNSUPPORTED: dict[str, str] = {
    "tools": "function calling",
    "tool_choice": "function calling",
    "functions": "function calling",
    "function_call": "function calling",
    "tool_calls": "function calling",
    "tool_call_id": "function calling",
    "response_format": "any format but text",
    "modalities": "any modality but text",
    "audio": "audio",
    "reasoning_effort": "reasoning effort",
    "verbosity": "verbosity",
    "web_search_options": "web search",
    "echo": "echoing the prompt",
    "suffix": "filling in before a suffix",
    "best_of": "best_of",
    "store": "storing",
    "refusal": "a refusal in a message",
    "image_url": "an image",
    "input_audio": "audio",
    "file": "a file",
}
"""Known fields and what they are for."""


class ApiModel(UserModel):
    """Strict: a number in quotes is no number. Fields with a neutral value are dropped before validation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if not _is_neutral(value, cls.neutral.get(key))}


def _is_neutral(value: Any, allowed: tuple[Any, ...] | None) -> bool:
    """`==`, but true is not 1."""
    return allowed is not None and any(type(value) is type(other) and value == other for other in allowed)


class StreamOptions(ApiModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(ApiModel):
    """What both kinds of requests have."""

    model: Annotated[str, Field(min_length=1, max_length=500)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[TokenKey, Bias] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | list[Text] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    # No effect on the output.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ContentPart(ApiModel):
    type: Literal["text"]
    text: str


class ChatMessage(ApiModel):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tool_calls": (None, []),
        "function_call": (None,),
        "refusal": (None,),
        "audio": (None,),
        "annotations": (None, []),
        "name": (None,),
    }
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(min_length=1)]
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
        "store": (None, False),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # No effect on the output.
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "echo": (None, False),
        "suffix": (None, ""),
        "best_of": (None, 1),
        "store": (None, False),
    }
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
