"""Stages of one chain must speak the same vocabulary."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from autopipe.core.errors import TokenizerMismatchError

_SHOWN = 3


def require_same_tokenizer(target: Any, drafter: Any, target_name: str = "", drafter_name: str = "") -> None:
    """Check that two transformers tokenizers give every token the same id.

    Padded vocabulary sizes of the models may differ, and so may special-token roles and chat templates: links
    between stages carry ids of tokens only.

    Args:
        target, drafter: tokenizers.
        target_name, drafter_name: how to call them in the error; default: their `name_or_path`.

    Raises:
        TokenizerMismatchError: names both, and shows the first tokens that differ.
    """
    if target is drafter:
        return
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    if ours == theirs:
        return
    our_name = target_name or target.name_or_path or "target"
    their_name = drafter_name or drafter.name_or_path or "drafter"
    our_tokens = {index: token for token, index in ours.items()}
    their_tokens = {index: token for token, index in theirs.items()}
    every = sorted(our_tokens.keys() | their_tokens.keys())
    different = [index for index in every if our_tokens.get(index) != their_tokens.get(index)]
    examples = "; ".join(
        f"id {index} is {_shown(our_tokens, index)} and {_shown(their_tokens, index)}" for index in different[:_SHOWN]
    )
    raise TokenizerMismatchError(
        f"the tokenizers of {our_name!r} (target, {len(ours)} tokens) and {their_name!r} (drafter, {len(theirs)} "
        f"tokens) differ in {len(different)} ids: {examples}. Choose a drafter with the target's tokenizer"
    )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hexadecimal digits that are equal for tokenizers that give every token the same id."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


def _shown(tokens: dict[int, str], index: int) -> str:
    return repr(tokens[index]) if index in tokens else "missing"
