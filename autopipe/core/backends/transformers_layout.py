"""How the transformers backend lays tokens out in forwards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

KEY_BLOCK = 128
"""Keys offered to a row end at a multiple of this."""
UNLIMITED = 1 << 20
_SPARE_KEYS = 32


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


@dataclass(frozen=True)
class Grid:
    """Where forwards are cut, and how many keys they have: a matter of positions alone.

    Attributes:
        rows: of a padded forward.
        max_length: longest sequence.
        long_from: see `long_from`.
    """

    rows: int
    max_length: int
    long_from: int | None

    def num_keys(self, position: int) -> int:
        """Keys offered to the row at a position: to the end of its block, and a few that no row may ever see.

        The few keep a forward's end from coinciding with the keys' end, for which transformers omits the mask.
        """
        return KEY_BLOCK * (position // KEY_BLOCK + 1) + _SPARE_KEYS * (1 + self.rows // _SPARE_KEYS)

    def border(self, position: int) -> int:
        """Where the positions end whose forwards turn by the same angles as that of `position`."""
        if self.long_from is not None and position < self.long_from < self.max_length:
            return self.long_from
        return self.max_length

    def sizes(self, position: int, count: int, most: int, block: int = UNLIMITED) -> list[int]:
        """Cut `count` tokens from `position` on: no part has more than `most`, or crosses a border or a multiple of
        `block`."""
        sizes = []
        while count:
            sizes.append(min(count, most, block - position % block, self.border(position) - position))
            position += sizes[-1]
            count -= sizes[-1]
        return sizes


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
