"""From a request's fields to the engine's options."""

from __future__ import annotations

import hashlib
import secrets

from autopipe.core.sampling import SamplingParams
from autopipe.service.config import Limits
from autopipe.service.errors import invalid
from autopipe.service.schemas import ChatRequest, CompletionRequest, SamplingFields

COMPLETION_TOKENS = 16
"""Output tokens of a completion that does not say how many (OpenAI's default)."""
ENGINE_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_logprobs": "logprobs",
    "idempotency_key": "Idempotency-Key",
}
"""The engine's key -> the request's field."""


def choice_params(
    request: ChatRequest | CompletionRequest,
    limits: Limits,
    prompt_tokens: int,
    context: int,
    key: str | None = None,
) -> list[SamplingParams]:
    """Options of each of the `n` choices, seeds included.

    Args:
        context: tokens that prompt and output may have together.
        key: idempotency key: the seed of a request that gives none comes from it, so that it is the same again.

    Raises:
        ApiError: fields that do not fit together, or exceed a limit.
        ConfigError: a value that the engine does not allow.
    """
    room = context - prompt_tokens
    if prompt_tokens > (limits.max_prompt_tokens or context) or room < 1:
        most = min(limits.max_prompt_tokens or context, context - 1)
        name = prompt_field(request)
        raise invalid(
            name,
            f"{name}: the prompt has {prompt_tokens} tokens; at most {most} are allowed",
            "context_length_exceeded",
        )
    unasked = secrets.randbits(63) if key is None else _hash(key)
    seed = unasked if request.seed is None else request.seed % 2**63
    fields = {
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": max(1.0 if request.top_p is None else request.top_p, 1e-9),
        "top_k": request.top_k if request.top_k and request.top_k > 0 else None,
        "min_p": request.min_p or 0.0,
        "repetition_penalty": request.repetition_penalty or 1.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "presence_penalty": request.presence_penalty or 0.0,
        "logit_bias": _logit_bias(request, limits),
        "max_new_tokens": _max_new_tokens(request, limits, prompt_tokens, room),
        "min_new_tokens": request.min_tokens or 0,
        "stop": _stops(request, limits),
        "num_logprobs": _num_logprobs(request),
    }
    return [SamplingParams.parse({**fields, "seed": derived_seed(seed, index)}) for index in range(request.n or 1)]


def derived_seed(seed: int, index: int) -> int:
    """The seed of a request's choice: its own for the first, so that `n` does not change it, a hash for the others."""
    if index == 0:
        return seed
    return _hash(f"{seed}:{index}")


def _hash(text: str) -> int:
    """63 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def prompt_field(request: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def check_fields(request: ChatRequest | CompletionRequest, limits: Limits) -> None:
    """Refuse what can be refused before a prompt is tokenised.

    Raises:
        ApiError: fields that do not fit together, or too many choices.
    """
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options: only together with stream")
    num_prompts = 1
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        num_prompts = 1 if isinstance(request.prompt[0], int) else len(request.prompt)
    num_choices = num_prompts * (request.n or 1)
    if num_choices > limits.max_choices:
        param = "n" if num_prompts <= limits.max_choices else "prompt"
        raise invalid(param, f"{param}: this would be {num_choices} choices; at most {limits.max_choices} are allowed")
    _stops(request, limits)
    _num_logprobs(request)


def _max_new_tokens(
    request: ChatRequest | CompletionRequest, limits: Limits, prompt_tokens: int, room: int
) -> int:  # fmt: skip
    name, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if asked is not None and asked != request.max_completion_tokens:
            raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        name, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is None:
        default = room if isinstance(request, ChatRequest) else min(room, COMPLETION_TOKENS)
        return min(default, limits.max_new_tokens or default)
    if limits.max_new_tokens is not None and asked > limits.max_new_tokens:
        raise invalid(name, f"{name}: {asked} is too many; at most {limits.max_new_tokens} are allowed")
    if asked > room:
        raise invalid(
            name,
            f"the prompt has {prompt_tokens} tokens and {name} is {asked}: together more than the context of "
            f"{prompt_tokens + room} tokens",
            "context_length_exceeded",
        )
    return asked


def _stops(request: SamplingFields, limits: Limits) -> tuple[str, ...]:
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stops) > limits.max_stops:
        raise invalid("stop", f"stop: {len(stops)} strings; at most {limits.max_stops} are allowed")
    if any(len(stop) > limits.max_stop_chars for stop in stops):
        raise invalid("stop", f"stop: strings of at most {limits.max_stop_chars} characters are allowed")
    return stops


def _logit_bias(request: SamplingFields, limits: Limits) -> dict[int, float]:
    bias = request.logit_bias or {}
    if len(bias) > limits.max_logit_bias:
        raise invalid("logit_bias", f"logit_bias: {len(bias)} entries; at most {limits.max_logit_bias} are allowed")
    return {int(token): value for token, value in bias.items()}


def _num_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if not request.logprobs:
        if request.top_logprobs is not None:
            raise invalid("top_logprobs", "top_logprobs: only together with logprobs: true")
        return None
    return request.top_logprobs or 0
