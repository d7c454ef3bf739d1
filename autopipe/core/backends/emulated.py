"""A stage made of a latency curve and an acceptance rate: it sleeps instead of computing.

With it the real engine runs hardware one does not own. The "text" is a toy: the target's pick is a hash of
position and previous token. Whether a drafter agrees at a position depends on the position alone, through one
uniform number shared by all stages, so agreement is nested: where a weaker drafter agrees, so does a stronger.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence

import torch

from autopipe.core.backends.base import CostNotes, StageBackend
from autopipe.core.errors import ConfigError, ContextLengthError, RollbackError
from autopipe.core.plan import EmulatedStage

_MASK = (1 << 64) - 1
_LOGIT = 30.0
"""Logit of the pick, the others' being 0: near-certain at temperature 1."""


class EmulatedFaultError(RuntimeError):
    """The failure that `fail_after` asked for."""


class EmulatedBackend(StageBackend):
    """See the module. Logits are one-hot, [n, spec.vocab_size]; exact by construction."""

    def __init__(self, spec: EmulatedStage, name: str = "emulated") -> None:
        self.name = name
        self.vocab_size = spec.vocab_size
        self.max_length = spec.max_length
        self.exact = True
        self._spec = spec
        self._sizes = sorted(spec.ms)
        self._ids: list[int] = []
        self._num_forwards = 0

    @property
    def length(self) -> int:
        return len(self._ids)

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        prefill_ms = self._spec.prefill_ms
        return self._append(ids, self._milliseconds(len(ids)) if prefill_ms is None else prefill_ms)[-1]

    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        return self._append(ids, self._milliseconds(len(ids)))

    def rollback(self, length: int) -> None:
        if not 0 <= length <= len(self._ids):
            raise RollbackError(f"{self.name}: cannot roll back to {length}, the cache holds {len(self._ids)} tokens")
        del self._ids[length:]

    def cost_notes(self) -> CostNotes:
        return CostNotes(weight_bytes=0, kv_bytes_per_token=0, notes="emulated")

    def _append(self, ids: Sequence[int], milliseconds: float) -> torch.Tensor:
        if not ids or any(not 0 <= token < self.vocab_size for token in ids):
            raise ConfigError("ids", list(ids)[:8], f"one or more token ids from 0 to {self.vocab_size - 1}")
        if len(self._ids) + len(ids) > self.max_length:
            raise ContextLengthError(f"{self.name}: {len(self._ids) + len(ids)} tokens, at most {self.max_length} fit")
        deadline = time.monotonic() + milliseconds / 1e3
        self._misbehave()
        start = len(self._ids)
        self._ids.extend(ids)
        logits = torch.zeros(len(ids), self.vocab_size, dtype=torch.float32)
        for row in range(len(ids)):
            logits[row, self._pick(start + row)] = _LOGIT
        time.sleep(max(0.0, deadline - time.monotonic()))
        return logits

    def _pick(self, position: int) -> int:
        """The token this stage puts after `position`."""
        spec = self._spec
        target = _hash(spec.seed, position, self._ids[position]) % spec.vocab_size
        if self._agrees(position + 1):
            return target
        return (target + 1 + _hash(spec.seed, position, 1 << 32) % (spec.vocab_size - 1)) % spec.vocab_size

    def _agrees(self, position: int) -> bool:
        spec = self._spec
        if spec.trace is not None:
            return spec.trace[position % len(spec.trace)]
        return _hash(spec.seed, position, 1 << 33) < spec.agreement * (1 << 64)

    def _milliseconds(self, num_tokens: int) -> float:
        index = max(bisect_right(self._sizes, num_tokens) - 1, 0)
        return self._spec.ms[self._sizes[index]]

    def _misbehave(self) -> None:
        self._num_forwards += 1
        if self._num_forwards == self._spec.fail_after:
            raise EmulatedFaultError(f"{self.name}: failed after {self._num_forwards} forwards, as asked")
        if self._num_forwards == self._spec.hang_after:
            time.sleep(3600)


def _hash(seed: int, position: int, salt: int) -> int:
    """A 64-bit hash (splitmix64's finaliser over the three numbers)."""
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + salt * 0x94D049BB133111EB + 1) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)
