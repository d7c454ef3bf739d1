"""A policy for somebody's engine and tokenizer, in one call: what `AutoPipe.set_policy` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.live_engine import LiveEngine
from autopipe.envs.prompt_kinds import PromptKind, prompt_kind
from autopipe.policies.base import Policy
from autopipe.policies.controller import RuntimeController
from autopipe.policies.registry import make_policy

if TYPE_CHECKING:
    from autopipe.core.telemetry import Sampler

_HEAD, _TAIL = 400, 200
"""Tokens of a prompt that its kind is guessed from."""


def attach_policy(
    engine: LiveEngine,
    policy: str | Path | Policy,
    *,
    tokenizer: Any = None,
    sampler: Sampler | None = None,
    **options: Any,
) -> RuntimeController:
    """Start a controller.

    Args:
        policy: a policy, its name, or the folder of a trained one.
        tokenizer: to guess the kinds of prompts from their text; None: they are not guessed.
        sampler: where telemetry comes from; None: none is used.
        options: further arguments of `RuntimeController`.

    Raises:
        ConfigError: no such policy.
    """
    made = policy if isinstance(policy, Policy) else make_policy(policy, "policy")

    def kind_of(token_ids: Sequence[int]) -> PromptKind:
        ids = list(token_ids)
        head = ids if len(ids) <= _HEAD + _TAIL else [*ids[:_HEAD], *ids[-_TAIL:]]
        return prompt_kind(tokenizer.decode(head, skip_special_tokens=True))

    chosen = kind_of if hasattr(tokenizer, "decode") else None
    return RuntimeController(engine, made, telemetry=sampler or False, prompt_kind=chosen, **options).start()
