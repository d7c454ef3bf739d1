"""A learned n-gram table: what the target tends to say after a few tokens, in a memory-mapped file."""

from __future__ import annotations

import json
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from autopipe.core.errors import ConfigError, ModelLoadError
from autopipe.core.ngram_counting import KEY_BITS, MULTIPLIER, SHIFT, count_contexts, entry_bytes, token_dtype
from autopipe.core.ngram_shipped import table_path

FORMAT = "autopipe-ngram-2"
MAX_TABLE_ORDER = 8

_KEY = "ngram.table"
_BUCKET_BITS = 3
"""About 2^3 keys are bisected after one look at where their leading bits start."""
_MAX_BUCKET_BITS = 20
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_DROPPED_BITS = 64 - KEY_BITS
_FORMATS: dict[str, Literal["I", "H", "B"]] = {"U32": "I", "U16": "H", "U8": "B"}  # safetensors dtype -> memoryview's
_DTYPES = {"keys": ("U32",), "token_ids": ("U16", "U32"), "counts": ("U8",), "shares": ("U8",)}


class TableMatch(NamedTuple):
    """What the table knows of the longest context it holds.

    Attributes:
        order: length of that context in tokens.
        token_id: its most frequent successor in the training text.
        occurrences: of the context, at most 255.
        share: of these, the share followed by `token_id`, in 1/255.
    """

    order: int
    token_id: int
    occurrences: int
    share: int


class NgramTable:
    """Read-only map from contexts of 1 to max_order tokens to their most frequent successor.

    Contexts are the leading 32 bits of their hashes in ascending order, looked up by bisection, longest context first,
    in microseconds. A loaded table stays on disk and is mapped, so processes share its pages. In a table of a million
    contexts, one unknown context in 4,300 is taken for a known one, and then a draft is wrong, never the output.

    File: safetensors with `keys` u32 [n], `token_ids` u16 or, where an id needs it, u32 [n], `counts` u8 [n], `shares`
    u8 [n]; metadata `format` and `max_order`, and what the maker added.

    Args:
        keys: leading bits of the contexts' hashes, ascending, none twice.
        token_ids: the most frequent successor of each.
        counts: occurrences of each context, at most 255.
        shares: of these, the share followed by that successor, in 1/255.
        max_order: longest context in tokens.
        metadata: of the maker.
    """

    def __init__(
        self,
        keys: Sequence[int],
        token_ids: Sequence[int],
        counts: Sequence[int],
        shares: Sequence[int],
        max_order: int,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._keys = keys
        self._token_ids = token_ids
        self._counts = counts
        self._shares = shares
        self._shift = KEY_BITS - min(max(len(keys).bit_length() - _BUCKET_BITS, 0), _MAX_BUCKET_BITS)
        self._bucket_ends = _bucket_ends(keys, self._shift)
        self.max_order = max_order
        self.metadata = dict(metadata or {})

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def max_token_id(self) -> int:
        """The largest token id it may propose (-1 if empty): must be below the target's vocabulary size."""
        return int(np.asarray(self._token_ids).max()) if len(self) else -1

    def match(self, text: Sequence[int]) -> TableMatch | None:
        """The entry of the longest suffix of `text` in the table, or None."""
        return self.match_keys(context_keys(text, self.max_order))

    def match_keys(self, hashes: Sequence[int]) -> TableMatch | None:
        """The entry of the longest of these contexts (from `context_keys`, shortest first), or None."""
        keys = self._keys
        for order in range(min(len(hashes), self.max_order), 0, -1):
            key = hashes[order - 1] >> _DROPPED_BITS
            bucket = key >> self._shift
            end = self._bucket_ends[bucket + 1]
            index = bisect_left(keys, key, self._bucket_ends[bucket], end)
            if index < end and keys[index] == key:
                return TableMatch(order, self._token_ids[index], self._counts[index], self._shares[index])
        return None

    @classmethod
    def build(
        cls,
        sequences: Iterable[Sequence[int] | npt.NDArray[np.integer[Any]]],
        *,
        max_order: int = 5,
        max_bytes: int = 8 << 20,
        min_count: int = 2,
        metadata: Mapping[str, str] | None = None,
    ) -> NgramTable:
        """Count contexts in token sequences and keep the most useful ones.

        A context is worth what it says beyond its own suffix: count x KL(Bernoulli(s) || Bernoulli(s')), where s is
        the share of its most frequent successor after it, s' the share of that same token after the context one
        token shorter (the relative-entropy pruning of Stolcke 1998, for the one token we use).

        Args:
            sequences: token ids; no context reaches from one sequence into the next.
            max_order: longest context, 1 to 8.
            max_bytes: budget for the entries: 8 bytes each, 10 where a token id is above 65,535.
            min_count: contexts seen less often are dropped.

        Raises:
            ConfigError: an argument out of range, or a token id outside 0 .. 2^32 - 1.
        """
        if not 1 <= max_order <= MAX_TABLE_ORDER:
            raise ConfigError("max_order", max_order, f"1 to {MAX_TABLE_ORDER}")
        if max_bytes < (least := entry_bytes((1 << 32) - 1)):
            raise ConfigError("max_bytes", max_bytes, f"at least {least}")
        if min_count < 1:
            raise ConfigError("min_count", min_count, "at least 1")
        arrays = count_contexts(sequences, max_order, min_count, max_bytes)
        return cls.of(arrays, max_order, metadata)

    @classmethod
    def of(
        cls, arrays: Mapping[str, npt.NDArray[Any]], max_order: int, metadata: Mapping[str, str] | None = None
    ) -> NgramTable:
        """A table of the arrays that `ngram_counting` makes."""
        views = {name: np.ascontiguousarray(array).data.toreadonly() for name, array in arrays.items()}
        return cls(**views, max_order=max_order, metadata=metadata)

    def save(self, path: str | Path) -> None:
        """Write the table as safetensors.

        Raises:
            ConfigError: the file cannot be written.
        """
        from safetensors.numpy import save

        arrays: dict[str, npt.NDArray[Any]] = {
            "keys": np.asarray(self._keys, dtype=np.uint32),
            "token_ids": np.asarray(self._token_ids, dtype=token_dtype(self.max_token_id)),
            "counts": np.asarray(self._counts, dtype=np.uint8),
            "shares": np.asarray(self._shares, dtype=np.uint8),
        }
        metadata = {**self.metadata, "format": FORMAT, "max_order": str(self.max_order)}
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")  # a process that has the old table mapped keeps it
        try:
            temporary.write_bytes(save(arrays, metadata=metadata))
            os.replace(temporary, path)
        except OSError as error:
            raise ConfigError(_KEY, str(path), f"a file that can be written ({error})") from None

    @classmethod
    def load(cls, path: str | Path) -> NgramTable:
        """Map a table file into memory.

        Args:
            path: a file, or the name of a table that comes with AutoPipe (`ngram_shipped.SHIPPED_TABLES`).

        Raises:
            ConfigError: no such file, or it cannot be read.
            ModelLoadError: it is not an n-gram table, or it is damaged.
        """
        path = table_path(path)
        try:
            with open(path, "rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise ConfigError(_KEY, str(path), f"a readable n-gram table ({error})") from None
        except ValueError:  # an empty file cannot be mapped
            raise ModelLoadError(f"{path} is not an n-gram table: it is empty") from None
        try:
            return cls(**_parse(data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(
                f"{path} is not an n-gram table, or it is damaged ({error}); make it again with `autopipe drafts ngram`"
            ) from None


def context_keys(text: Sequence[int], max_order: int) -> list[int]:
    """64-bit hashes of the last 1, 2, ... max_order tokens of `text`, the shortest context first."""
    keys = []
    key = 0
    for depth in range(1, min(max_order, len(text)) + 1):
        key = ((key ^ text[-depth]) + depth) * MULTIPLIER & _MASK
        key ^= key >> SHIFT
        keys.append(key)
    return keys


def _bucket_ends(keys: Sequence[int], shift: int) -> list[int]:
    """Where the keys of each bucket (equal bits above `shift`) end; a 0 first. Hashes spread evenly over buckets."""
    buckets = np.array(keys, dtype=np.int64) >> shift
    counts = np.bincount(buckets, minlength=1 << (KEY_BITS - shift))
    return [0, *np.cumsum(counts).tolist()]


def _parse(data: memoryview) -> dict[str, Any]:
    """Views of the arrays in a safetensors file (u64 header size, JSON header, data). ValueError if it is wrong."""
    header_end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_end > len(data):
        raise ValueError("cut short")
    header = json.loads(bytes(data[8:header_end]))
    metadata = header.pop("__metadata__", {})
    if metadata.get("format") != FORMAT:
        raise ValueError(f"format {metadata.get('format')!r} instead of {FORMAT!r}")
    max_order = int(metadata["max_order"])
    if not 1 <= max_order <= MAX_TABLE_ORDER:
        raise ValueError(f"max_order {max_order}")
    views: dict[str, Any] = {}
    for name, dtypes in _DTYPES.items():
        start, end = header[name]["data_offsets"]
        dtype = header[name]["dtype"]
        if dtype not in dtypes or not 0 <= start <= end <= len(data) - header_end:
            raise ValueError(f"wrong type or extent of {name}")
        views[name] = data[header_end + start : header_end + end].cast(_FORMATS[dtype])
    lengths = {len(view) for view in views.values()}
    if len(lengths) != 1:
        raise ValueError("arrays of different lengths")
    keys = np.frombuffer(views["keys"], dtype=np.uint32) if lengths != {0} else np.empty(0, np.uint32)
    if not bool(np.all(keys[1:] > keys[:-1])):
        raise ValueError("keys out of order")
    return {**views, "max_order": max_order, "metadata": metadata}
