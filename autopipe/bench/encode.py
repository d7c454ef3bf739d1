"""From a prompt to the token ids that the target gets."""

from __future__ import annotations

from typing import Any

from autopipe.bench.prompts import Prompt
from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan
from autopipe.core.preflight import Progress


def load_tokenizer(plan: Plan, *, progress: Progress | None = None) -> Any:
    """The target's tokenizer; for an emulated target a toy, in which bytes are tokens."""
    if plan.target.is_emulated:
        from autopipe.core.preflight import toy_tokenizer

        return toy_tokenizer()
    from autopipe.core.models.loading import load_tokenizer as load
    from autopipe.core.models.spec import resolve

    source = resolve(plan.target.model, f"chain.{len(plan.chain) - 1}.model")
    return load(source, trust_remote_code=plan.target.trust_remote_code, progress=progress)


def encode_prompt(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a prompt, as `AutoPipe.encode` makes them: messages go through the chat template.

    Raises:
        ConfigError: messages, and a tokenizer without a chat template.
    """
    if prompt.messages is None:
        return [int(token) for token in tokenizer(prompt.text)["input_ids"]]
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("--prompts", prompt.name, "raw prompts: this target's tokenizer has no chat template")
    text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
