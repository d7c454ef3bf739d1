"""Stages of one chain must speak the same vocabulary."""

from __future__ import annotations

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
    names = [target_name or target.name_or_path or "target", drafter_name or drafter.name_or_path or "drafter"]
    by_id = ({index: token for token, index in ours.items()}, {index: token for token, index in theirs.items()})
    different = sorted(
        index for index in by_id[0].keys() | by_id[1].keys() if by_id[0].get(index) != by_id[1].get(index)
    )
    examples = "; ".join(
        f"id {index} is {_shown(by_id[0], index)} and {_shown(by_id[1], index)}" for index in different[:_SHOWN]
    )
    raise TokenizerMismatchError(
        f"the tokenizers of {names[0]!r} (target, {len(ours)} tokens) and {names[1]!r} (drafter, {len(theirs)} tokens) "
        f"differ in {len(different)} ids: {examples}. Choose a drafter with the target's tokenizer"
    )


def _shown(tokens: dict[int, str], index: int) -> str:
    return repr(tokens[index]) if index in tokens else "missing"
