"""Prompts of the live environment's stream, and their token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan
from autopipe.envs.prompt_kinds import PromptKind, prompt_kind


@dataclass(frozen=True, slots=True)
class LivePrompt:
    """A prompt of the live stream: token ids, or text for the target's tokenizer.

    Attributes:
        kind: None: guessed from the text, `other` for token ids.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    kind: PromptKind | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise ConfigError("prompts", "text and token_ids", "exactly one of text, token_ids")


DEFAULT_PROMPTS = (
    LivePrompt("Write a Python function that merges two sorted lists.", kind=PromptKind.CODE),
    LivePrompt("How do I keep basil alive through the winter?", kind=PromptKind.CHAT),
    LivePrompt(
        "Summarise in two sentences: The harbour was rebuilt after the flood. It now has three basins, the largest of "
        "which is reserved for fishing boats. The two smaller ones are let to private owners, and pay for the rest.",
        kind=PromptKind.SUMMARY,
    ),
)


def encode_prompts(prompts: Sequence[LivePrompt | str], plan: Plan) -> list[tuple[tuple[int, ...], PromptKind]]:
    """Token ids and kind of every prompt; text goes through the target's chat template where it has one.

    Raises:
        ModelLoadError: the target's tokenizer cannot be loaded.
    """
    given = [LivePrompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    tokenizer: Any = None
    encoded: list[tuple[tuple[int, ...], PromptKind]] = []
    for prompt in given:
        if prompt.token_ids is not None:
            encoded.append((prompt.token_ids, prompt.kind or PromptKind.OTHER))
            continue
        text = prompt.text or ""
        if tokenizer is None:
            tokenizer = _tokenizer(plan)
        kind = prompt.kind or prompt_kind(text)
        if getattr(tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded.append((tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), kind))
    return encoded


def _tokenizer(plan: Plan) -> Any:
    if plan.target.is_emulated:
        from autopipe.core.preflight import toy_tokenizer

        return toy_tokenizer()
    from autopipe.core.models import load_tokenizer, resolve

    return load_tokenizer(resolve(plan.target.model), trust_remote_code=plan.target.trust_remote_code)
