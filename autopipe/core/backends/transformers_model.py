"""What a transformers model says of itself."""

from __future__ import annotations

import inspect
from typing import Any


def stateful_reason(model: Any) -> str | None:
    """Why a model cannot be rolled back whatever its cache, in words; None: there is no such reason."""
    if getattr(model, "_is_stateful", False):
        return "it keeps a running state, which cannot be rolled back token by token"
    return None


def vocabulary(model: Any) -> tuple[int, int]:
    """Rows of the output head, and how many token ids both it and the input embeddings know."""
    embeddings = int(model.get_input_embeddings().weight.shape[0])
    head = model.get_output_embeddings()
    rows = getattr(head, "out_features", None) or model.config.get_text_config(decoder=True).vocab_size
    return int(rows), min(int(rows), embeddings)


def cache_argument(model: Any) -> str:
    """The cache is `cache` from transformers 5.2x on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
