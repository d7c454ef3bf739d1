"""Counting and pruning behind `NgramTable.build`, vectorised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from autopipe.core.errors import ConfigError

Array = npt.NDArray[Any]

MULTIPLIER, SHIFT = 0x9E3779B97F4A7C15, 29
"""Of the contexts' hash: here over whole arrays, in `ngram_table.context_keys` for one text."""
KEY_BITS = 32
"""Leading bits of a context's hash that a table keeps."""

_DROPPED_BITS = np.uint64(64 - KEY_BITS)
_SMOOTHING = 0.5
"""Added to a successor's count and (twice) to the context's: one occurrence does not make certainty."""


def count_contexts(
    sequences: Iterable[Sequence[int] | npt.NDArray[np.integer[Any]]], max_order: int, min_count: int, max_bytes: int
) -> dict[str, Array]:
    """The arrays of an `NgramTable`: keys, token_ids, counts, shares."""
    tokens, starts = _joined(sequences)
    successors = tokens.astype(np.uint32)
    found: list[dict[str, Array]] = []
    shorter_keys = np.zeros(len(tokens), dtype=np.uint64)  # by position: hash of the context before it
    shorter_pairs = _pair_counts(shorter_keys, successors)
    shorter_totals = np.full(len(tokens), len(tokens), dtype=np.int64)
    depth_available = np.arange(len(tokens)) - starts
    for order in range(1, max_order + 1):
        valid = depth_available >= order
        keys = np.zeros_like(shorter_keys)
        position = np.flatnonzero(valid)
        keys[position] = _extend(shorter_keys[position], tokens[position - order], order)
        if not len(position):
            break
        pairs = np.zeros(len(tokens), dtype=np.int64)
        pairs[position] = _pair_counts(keys[position], successors[position])
        totals = np.zeros(len(tokens), dtype=np.int64)
        totals[position] = _counts(keys[position])
        found.append(_best(keys, successors, pairs, totals, shorter_pairs, shorter_totals, position, min_count))
        shorter_keys, shorter_pairs, shorter_totals = keys, pairs, totals
    return _kept(found, max_bytes // entry_bytes(int(tokens.max(initial=0))))


def token_dtype(max_token_id: int) -> type[np.uint16] | type[np.uint32]:
    """The smaller type that holds all token ids."""
    return np.uint16 if max_token_id < 1 << 16 else np.uint32


def entry_bytes(max_token_id: int) -> int:
    """Of one entry of a table: 8, or 10."""
    return KEY_BITS // 8 + token_dtype(max_token_id)().itemsize + 2


def as_table(hashes: Array, token_ids: Array, counts: Array, shares: Array) -> dict[str, Array]:
    """The arrays of an `NgramTable`, of entries with 64-bit hashes; of those that share a key, the first is kept."""
    keys, first = np.unique(hashes.astype(np.uint64) >> _DROPPED_BITS, return_index=True)
    return {
        "keys": keys.astype(np.uint32),
        "token_ids": token_ids[first].astype(token_dtype(int(token_ids.max(initial=0)))),
        "counts": counts[first].astype(np.uint8),
        "shares": shares[first].astype(np.uint8),
    }


def _joined(sequences: Iterable[Sequence[int] | npt.NDArray[np.integer[Any]]]) -> tuple[Array, Array]:
    """All tokens in one array, and for each the position at which its sequence starts."""
    try:
        arrays = [np.asarray(sequence, dtype=np.int64).reshape(-1) for sequence in sequences]
    except (ValueError, TypeError, OverflowError):
        raise ConfigError("sequences", "other things", "sequences of token ids") from None
    if not arrays:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    tokens = np.concatenate(arrays)
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= 2**32):
        raise ConfigError("sequences", int(tokens.min()), "token ids of 0 to 2^32 - 1")
    lengths = np.array([len(array) for array in arrays], dtype=np.int64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return tokens.astype(np.uint64), starts


def _extend(keys: Array, tokens: Array, order: int) -> Array:
    """Hash of a context from that of its suffix and the token before; the same as in `NgramTable.match`."""
    mixed = ((keys ^ tokens) + np.uint64(order)) * np.uint64(MULTIPLIER)
    mixed ^= mixed >> np.uint64(SHIFT)
    return mixed


def _counts(values: Array) -> Array:
    """How often each element occurs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return counts[inverse]


def _pair_counts(keys: Array, successors: Array) -> Array:
    """How often each (key, successor) occurs."""
    _, inverse = np.unique(keys, return_inverse=True)
    return _counts(inverse.astype(np.uint64) << np.uint64(32) | successors.astype(np.uint64))


def _best(
    keys: Array,
    successors: Array,
    pairs: Array,
    totals: Array,
    shorter_pairs: Array,
    shorter_totals: Array,
    position: Array,
    min_count: int,
) -> dict[str, Array]:
    """Of each context of one order its most frequent successor (the smallest id among equals) and its worth."""
    order = position[np.lexsort((successors[position], -pairs[position], keys[position]))]
    first = order[np.r_[True, keys[order][1:] != keys[order][:-1]]] if len(order) else order
    first = first[totals[first] >= min_count]
    share = (pairs[first] + _SMOOTHING) / (totals[first] + 2 * _SMOOTHING)
    shorter = (shorter_pairs[first] + _SMOOTHING) / (shorter_totals[first] + 2 * _SMOOTHING)
    divergence = share * np.log(share / shorter) + (1 - share) * np.log((1 - share) / (1 - shorter))
    return {
        "keys": keys[first],
        "token_ids": successors[first],
        "totals": totals[first],
        "bests": pairs[first],
        "worth": totals[first] * divergence,
    }


def _kept(found: list[dict[str, Array]], max_entries: int) -> dict[str, Array]:
    """The entries worth most."""
    if not found:
        return as_table(*[np.empty(0, dtype=np.uint64)] * 4)
    joined = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    useful = np.argsort(-joined["worth"], kind="stable")[:max_entries]
    entries = {name: array[useful] for name, array in joined.items()}
    shares = np.round(255 * entries["bests"] / entries["totals"])
    return as_table(entries["keys"], entries["token_ids"], np.minimum(entries["totals"], 255), shares)
