"""What computes a fused model's forward: native CPU kernels, padded torch, or CUDA graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from autopipe.core.backends.base import best_ids


class Runner(ABC):
    """A decoder and its KV cache. Arguments are checked by `FusedBackend`.

    Attributes:
        exact: a row's logits are bitwise the same however tokens are grouped into calls.
        shortfalls: what could not be had as asked, in words.
    """

    shortfalls: tuple[str, ...] = ()

    exact: bool
    weight_bytes: int
    kv_bytes_per_token: int

    @property
    @abstractmethod
    def description(self) -> str:
        """For cost notes, e.g. which instruction set is used."""

    @abstractmethod
    def run(self, ids: Sequence[int], position: int, num_logits: int) -> torch.Tensor:
        """Put `ids` at `position` and on; logits after the last `num_logits` of them, fp32 [num_logits, vocab].

        What the cache holds at `position` and beyond is overwritten. The result is valid until the next call.
        """

    def prepare_best(self) -> None:  # noqa: B027 - optional hook
        """Make `best` as fast as it can be; may take a second and some memory."""

    def best(self, ids: Sequence[int], position: int, num_logits: int) -> list[int]:
        """As `run`, but of each row only the lowest id of the largest logit; -1: no logit is a number above -inf."""
        return best_ids(self.run(ids, position, num_logits))

    def set_threads(self, threads: int) -> None:  # noqa: B027 - only CPU runners have threads
        """Compute with so many threads from now on."""

    @abstractmethod
    def close(self) -> None:
        """Free weights and cache."""
