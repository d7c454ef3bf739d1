"""The contract between the engine and a stage's model.

A stage backend holds one causal language model and one KV cache for one sequence. The engine calls it
from one thread only. Sequence positions count from 0; *length* is the number of tokens in the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class CostNotes:
    """What a planner must know of a backend without running it. Unknown figures are None."""

    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    notes: str = ""


def best_ids(logits: torch.Tensor) -> list[int]:
    """The lowest id of the largest of each row; -1 where that is NaN or -inf. Logits are float32 [n, vocab]."""
    rows = logits.numpy()  # numpy: torch would wake its threads beside ours
    return [int(token) if row[token] > -np.inf else -1 for row, token in zip(rows, rows.argmax(axis=1), strict=True)]


class StageBackend(ABC):
    """One model with a cache that can be rolled back.

    Contract (checked by `autopipe.core.backends.conformance`):

    * `prefill` and `forward` append tokens to the cache; `length` grows by the number of tokens given.
    * `rollback(n)` forgets every token at positions >= n. Afterwards the backend behaves exactly as if only
      the first n tokens had ever been given: forwarding the same tokens again gives the same logits.
    * `reset()` is `rollback(0)` plus forgetting anything else about the request.
    * If `exact` is true, a row of logits returned by `forward` is bitwise the same however the tokens since the
      prefill were grouped into calls. `prefill` is deterministic, but may round differently from `forward`.
    * `best` does what `forward` does, and gives of every row no more than a greedy choice needs.
    * Logits are float32 on the CPU. The returned tensor is valid until the next call.

    Errors:
        RollbackError: `rollback` to a negative length or beyond `length`.
        ContextLengthError: more than `max_length` tokens in all. The cache is unchanged.
        ConfigError: a token id outside the vocabulary, or an empty list of tokens. The cache is unchanged.
    """

    name: str
    vocab_size: int
    """Rows of the output head, padding included."""
    max_length: int
    """Longest sequence in tokens."""
    exact: bool
    choice_reason: str = ""
    """Why this backend was chosen for the stage, and what it had to do for exactness, in words."""

    @property
    def shortfalls(self) -> Sequence[str]:
        """What could not be had as asked since it was loaded, in words: for the stats."""
        return ()

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens in the cache."""

    @abstractmethod
    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        """Append many tokens; return the logits after the last one, float32 [vocab_size]."""

    @abstractmethod
    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        """Append n tokens; return the logits after each, float32 [n, vocab_size]."""

    def best(self, ids: Sequence[int]) -> list[int]:
        """Append n tokens; return the id of the largest logit after each, the lowest of equal ones; -1: there is none
        above -inf (NaN)."""
        return best_ids(self.forward(ids))

    def prepare_best(self) -> None:  # noqa: B027 - optional hook
        """Make `best` as fast as it can be; may take a second and some memory."""

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Forget every token at positions >= length."""

    def reset(self) -> None:
        """Forget the sequence."""
        self.rollback(0)

    def close(self) -> None:  # noqa: B027 - optional hook
        """Free weights and cache. The backend is not used afterwards."""

    def cost_notes(self) -> CostNotes:
        return CostNotes()
