"""Several sequences of one model in one forward: what the answer generator needs, and a stand-in without batching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from autopipe.core.backends.base import StageBackend


class BatchForward(Protocol):
    """A model with a KV cache for each of `slots` sequences."""

    slots: int
    vocab_size: int
    max_length: int

    def forward(self, segments: Sequence[tuple[int, Sequence[int], int]]) -> torch.Tensor:
        """Append tokens to several sequences.

        Args:
            segments: slot, token ids to append, and of how many of these (the last ones) logits are wanted.

        Returns:
            float32 [sum of wanted, vocab_size], in the order of `segments`; valid until the next call.
        """
        ...

    def rollback(self, slot: int, length: int) -> None:
        """Forget the slot's tokens at positions >= length."""
        ...

    def close(self) -> None: ...


class OneSequence:
    """A `StageBackend` as a batch of one sequence, for backends that cannot batch."""

    slots = 1

    def __init__(self, backend: StageBackend) -> None:
        self._backend = backend
        self.vocab_size = backend.vocab_size
        self.max_length = backend.max_length

    def forward(self, segments: Sequence[tuple[int, Sequence[int], int]]) -> torch.Tensor:
        (_, ids, num_logits), *_ = segments
        if num_logits == 1 and len(ids) > 1 and self._backend.length == 0:
            return self._backend.prefill(ids)[None]  # [1, vocab]
        return self._backend.forward(ids)[len(ids) - num_logits :]  # [num_logits, vocab]

    def rollback(self, slot: int, length: int) -> None:
        self._backend.rollback(length)

    def close(self) -> None:
        self._backend.close()
