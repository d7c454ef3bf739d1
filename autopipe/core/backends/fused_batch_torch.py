"""Batched forwards in torch: one sequence after another, for machines without native kernels and for CUDA.

Every block of rows has the same number of rows, also while a prompt is read: so a row's bits depend on nothing but its
sequence, and the price is a slower reading of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autopipe.core.backends.batch import Segment, TurnsBatchRunner
from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.backends.fused_torch import CHUNK_TOKENS, EXACT_ROWS, TorchDecoder
from autopipe.core.errors import KVMemoryError


@dataclass
class _Cache:
    """One sequence's keys and values per layer."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    capacity: int = 0


class TorchBatchRunner(TurnsBatchRunner):
    """See the module."""

    def __init__(
        self,
        shape: DecoderShape,
        state: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: str,
        threads: int | None,
        slots: int,
        max_length: int,
        kv_bytes: int | None = None,
    ) -> None:
        super().__init__(slots, shape.vocab, max_length)
        self._kv_bytes = kv_bytes
        self._decoder = TorchDecoder(shape, state, dtype, device, max_length)
        self.weight_bytes = self._decoder.weight_bytes
        self.kv_bytes_per_token = shape.kv_numbers_per_token * dtype.itemsize
        self._caches = [_Cache() for _ in range(slots)]
        cos, sin = shape.rope_tables(max_length)
        self._rope = cos.to(device), sin.to(device)
        if threads is not None:
            self.set_threads(threads)

    @property
    def description(self) -> str:
        return f"torch on {self._decoder.device}, fixed shapes of {EXACT_ROWS} rows, one sequence after another"

    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def _load(self, slot: int, length: int) -> None:
        """Make a slot's cache the decoder's, with room for `length` tokens."""
        decoder, cache = self._decoder, self._caches[slot]
        if length > cache.capacity and self._kv_bytes is not None:
            others = self.kv_bytes_in_use()
            if others and others + max(length, 2 * cache.capacity) * self.kv_bytes_per_token > self._kv_bytes:
                raise KVMemoryError(f"{others} of {self._kv_bytes} bytes of KV memory are in use")
        decoder.keys, decoder.values, decoder.capacity = cache.keys, cache.values, cache.capacity
        decoder.make_room(length)
        decoder.cos, decoder.sin = self._rope
        cache.keys, cache.values, cache.capacity = decoder.keys, decoder.values, decoder.capacity

    @torch.inference_mode()
    def _run_one(self, segment: Segment, length: int) -> torch.Tensor:
        self._load(segment.slot, length + len(segment.ids))
        decoder, device = self._decoder, self._decoder.device
        logits = [torch.empty(0, self.vocab_size, dtype=torch.float32)]
        for begin in range(0, len(segment.ids), EXACT_ROWS):
            ids = list(segment.ids[begin : begin + EXACT_ROWS])
            padding = [0] * (EXACT_ROWS - len(ids))
            places = list(range(length + begin, length + begin + len(ids)))
            hidden = decoder.block(
                torch.tensor(ids + padding, device=device),
                torch.tensor(places + padding, device=device),
                torch.tensor(places + [decoder.capacity] * len(padding), device=device),
                -(-(places[-1] + 1) // CHUNK_TOKENS),
            )
            wanted = min(len(ids), segment.num_logits - (len(segment.ids) - begin - len(ids)))
            if wanted > 0:
                logits.append(decoder.logits(hidden)[len(ids) - wanted : len(ids)].cpu())
        return torch.cat(logits)

    def _truncate(self, slot: int, length: int) -> None:
        if length == 0:
            self._caches[slot] = _Cache()

    @torch.inference_mode()
    def _copy_prefix(self, source: int, destination: int, length: int) -> None:
        if length == 0:
            return
        self._load(destination, length)
        old, new = self._caches[source], self._caches[destination]
        for of_old, of_new in ((old.keys, new.keys), (old.values, new.values)):
            for layer, tensor in enumerate(of_new):
                tensor[:, :length] = of_old[layer][:, :length]

    @property
    def capacity_tokens(self) -> int | None:
        return None if self._kv_bytes is None else self._kv_bytes // self.kv_bytes_per_token

    def free_tokens(self) -> int | None:
        if self._kv_bytes is None:
            return None
        return max(0, self._kv_bytes - self.kv_bytes_in_use()) // self.kv_bytes_per_token

    def kv_bytes_in_use(self) -> int:
        return sum(tensor.nbytes for cache in self._caches for tensor in (*cache.keys, *cache.values))

    def close(self) -> None:
        self._caches.clear()
        self._decoder.layers.clear()
