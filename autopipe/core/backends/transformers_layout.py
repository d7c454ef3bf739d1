"""How the transformers backend lays tokens out in forwards."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Layout(StrEnum):
    """How tokens are laid out in a model's forward."""

    FREE = "free"
    """As many rows as tokens, as many keys as tokens: not exact."""
    ROWS = "rows"
    """As many rows as tokens over a fixed number of keys: exact with our own kernels, whose rows are independent."""
    PADDED = "padded"
    """A fixed number of rows over a fixed number of keys: exact where rows do not influence each other."""
    SINGLE = "single"
    """One row, as many keys as tokens: exact for every model."""


def long_from(config: Any) -> int | None:
    """The position from which a forward turns all its rows by longrope's long factors, if the model has two sets.

    transformers chooses one set for a whole forward, by its last position.
    """
    decoder = config.get_text_config(decoder=True)
    parameters = getattr(decoder, "rope_parameters", None) or getattr(decoder, "rope_scaling", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for kind in kinds:
        if "longrope" in (kind.get("rope_type"), kind.get("type")):
            own = getattr(decoder, "original_max_position_embeddings", None)
            return int(kind.get("original_max_position_embeddings") or own or decoder.max_position_embeddings)
    return None
