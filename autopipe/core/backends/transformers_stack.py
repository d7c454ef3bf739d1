"""Rows of several sequences in one forward of a transformers model: the weights are read once for all of them.

The model sees one sequence whose rows have positions of their own. What tells sequences apart is the cache, which
stores each row where it belongs, and our attention, in which every block of rows has the keys, and the shapes, that it
has alone. So this is for models whose linear layers run on our kernels and that attend through our function; whether it
is right for a model, bit for bit, is found out by trying.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache

from autopipe.core.backends.transformers import MOST_ROWS, TransformersBackend
from autopipe.core.backends.transformers_attention import QUERY_ROWS, Block, attending_in, remember_keys
from autopipe.core.backends.transformers_cache import HeldSequence, RollbackLayer, Step
from autopipe.core.backends.transformers_layout import KEY_BLOCK, UNLIMITED, Layout

_TRIAL = ((9, 1), (3, 2), (40, 5))
"""Lengths of texts, and rows after them, by which stacking is tried out."""


class Part(NamedTuple):
    """Tokens to append to a sequence."""

    sequence: HeldSequence
    ids: Sequence[int]


class _Place(NamedTuple):
    """Where a sequence's rows lie in the forward, and in the sequence."""

    rows: slice
    step: Step


class _StackedLayer(RollbackLayer):
    """One layer of all sequences."""

    def __init__(self, members: Sequence[RollbackLayer], places: Sequence[_Place], step: Step) -> None:
        super().__init__(step, members[0].sliding_window)
        self._members, self._places = members, places

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store each row with its sequence, and leave the keys of each for the attention that follows."""
        found = [
            member.update_at(place.step, key_states[:, :, place.rows], value_states[:, :, place.rows])
            for member, place in zip(self._members, self._places, strict=True)
        ]
        remember_keys(found)
        return found[0]


def forward_stacked(backend: TransformersBackend, parts: Sequence[Part], length: int = 0) -> torch.Tensor:
    """Append tokens to sequences; after an error they must be rolled back.

    Args:
        parts: each with a sequence of its own, which is not empty; at most `MOST_ROWS` tokens in all.
        length: what the cache says if the model asks how long the sequence is; no answer is right for all.

    Returns:
        Logits after each token, float32 [tokens, vocab_size], the parts' rows in order.
    """
    grid = backend.grid
    blocks, places = list[Block](), list[_Place]()
    ids, positions = list[int](), list[int]()
    for member, (sequence, new) in enumerate(parts):
        start = position = len(sequence.ids)
        for size in grid.sizes(start, len(new), QUERY_ROWS, KEY_BLOCK):
            blocks.append(Block(size, grid.num_keys(position), member, position))
            position += size
        step = Step(start, start, position, blocks[-1].keys)
        places.append(_Place(slice(len(ids), len(ids) + len(new)), step))
        ids += new
        positions += range(start, position)
    whole = Step(start=length, num_keys=max(block.keys for block in blocks))
    layers = [
        _StackedLayer([part.sequence.cache.layers[index] for part in parts], places, whole)
        if isinstance(layer, RollbackLayer)
        else layer
        for index, layer in enumerate(parts[0].sequence.cache.layers)
    ]
    with torch.inference_mode(), attending_in(blocks, stacked=True):
        logits = backend.call(ids, Cache(layers=layers), positions=positions)
    for sequence, new in parts:
        sequence.ids.extend(new)
    return logits.float().cpu().clone()


def reason_unstackable(backend: TransformersBackend) -> str | None:
    """Why rows of several sequences cannot be computed together, in words; None: they can, to the bit."""
    if backend.layout is not Layout.ROWS:
        return f"its layout is {backend.layout.value}"
    if backend.grid.long_from is not None:
        return "its positions turn by another set of angles from some length on"
    vocab_size, max_length = backend.vocab_size, backend.max_length
    trials = [(length, rows) for length, rows in _TRIAL if length + rows <= max_length]
    texts = [[(7919 * (n + 1) + 31 * place) % vocab_size for place in range(sum(trial))]
             for n, trial in enumerate(trials)]  # fmt: skip
    before = backend.sequence
    try:
        alone = torch.cat([backend.forward(part.ids) for part in _begun(backend, texts, trials)])
        for length in (0, UNLIMITED):
            together = forward_stacked(backend, list(_begun(backend, texts, trials)), length)
            if not torch.equal(together, alone):
                return "its rows are not independent of other sequences"
    except Exception as error:  # whatever the model's code may raise: it can take turns
        return f"it cannot run ({str(error).partition(chr(10))[0] or type(error).__name__})"
    finally:
        backend.sequence = before
    return None


def _begun(
    backend: TransformersBackend, texts: Sequence[Sequence[int]], trials: Sequence[tuple[int, int]]
) -> Iterator[Part]:
    """A new sequence for the beginning of each text, the backend's for the moment, and the rest of the text."""
    for text, (length, _) in zip(texts, trials, strict=True):
        backend.sequence = backend.new_sequence()
        backend.prefill(text[:length])
        yield Part(backend.sequence, text[length:])


def split(parts: Sequence[Part], most: int = MOST_ROWS) -> list[list[Part]]:
    """Parts in groups of at most so many rows; a larger part has a group of its own."""
    groups: list[list[Part]] = []
    room = 0
    for part in parts:
        if not groups or len(part.ids) > room:
            groups.append([])
            room = most
        groups[-1].append(part)
        room -= len(part.ids)
    return groups
