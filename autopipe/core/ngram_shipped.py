"""N-gram tables that come with AutoPipe, by the name of the target they were learned from."""

from __future__ import annotations

from pathlib import Path

SHIPPED_TABLES = {"smollm2-135m": "smollm2-135m.ngram.safetensors"}

TOKENIZER_KEY = "tokenizer"
"""Metadata of a table: `tokenizer_fingerprint` of the tokenizer it was learned with."""

_FOLDER = Path(__file__).parent.parent / "drafters"


def table_path(table: str | Path) -> Path:
    """The file of a table: a shipped one for a name in `SHIPPED_TABLES`, else the path itself."""
    shipped = SHIPPED_TABLES.get(str(table))
    return Path(table) if shipped is None else _FOLDER / shipped
