"""How the transformers backend lays tokens out in forwards."""

from __future__ import annotations

from enum import StrEnum


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
