"""Batched forwards on our own CPU kernels, KV caches in pages."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence

import torch

from autopipe.core.affinity import usable_cores
from autopipe.core.backends.batch import BatchRunner, Segment
from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.backends.kv_pages import PagePool
from autopipe.core.backends.packed_decoder import PackedDecoder
from autopipe.core.errors import ConfigError, KVMemoryError
from autopipe.core.kernels import native
from autopipe.core.kernels.formats import WeightFormat

PAGE_TOKENS = 64
"""Positions per KV page: prefixes are shared in whole pages, the rest is copied."""


class NativeBatchRunner(BatchRunner):
    """One library call per forward. Sequences may share pages; a shared page is copied before it is written to.

    Args:
        kv_bytes: most memory of all KV caches; None: no bound.
        isa: instruction set; None: the best one.
        weights, shared_layers: as of `PackedDecoder`.

    Raises:
        ConfigError: kv_bytes holds no sequence of max_length.
    """

    page_tokens = PAGE_TOKENS

    def __init__(
        self,
        shape: DecoderShape,
        state: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        threads: int | None,
        slots: int,
        max_length: int,
        kv_bytes: int | None = None,
        isa: str | None = None,
        weights: WeightFormat | None = None,
        shared_layers: Collection[int] = (),
    ) -> None:
        packed = PackedDecoder(shape, state, dtype, isa, weights=weights, shared_layers=shared_layers)
        self._run_on(packed, threads, slots, shape.vocab, max_length, kv_bytes)

    def _run_on(
        self,
        weights: PackedDecoder,
        threads: int | None,
        slots: int,
        vocab_size: int,
        max_length: int,
        kv_bytes: int | None,
    ) -> None:
        super().__init__(slots, vocab_size, max_length)
        self._weights, self.shortfalls = weights, weights.shortfalls
        shape = self._shape = weights.shape
        self.weight_bytes = self._weights.weight_bytes
        self._threads = threads or usable_cores()
        self._start()
        page_bytes = self._model.page_elements * weights.dtype.itemsize
        self.kv_bytes_per_token = page_bytes // PAGE_TOKENS
        least = -(-max_length // PAGE_TOKENS) * page_bytes
        if kv_bytes is not None and kv_bytes < least:
            raise ConfigError("kv_bytes", kv_bytes, f"at least {least}, one sequence of {max_length} tokens")
        self._pool = PagePool(page_bytes, None if kv_bytes is None else kv_bytes // page_bytes)
        self._pages: list[list[int]] = [[] for _ in range(slots)]
        self._rope = shape.rope_tables(max_length)
        self._logits = torch.empty(0, shape.vocab, dtype=torch.float32)

    @property
    def description(self) -> str:
        shared = self._weights.sharing_note
        return (
            f"native kernels, {self._weights.isa}, {self._threads} threads, rows of all sequences in one pass{shared}"
        )

    def _start(self) -> None:
        self._team = native.Team(self._threads)
        self._model = self._weights.model(self._team, PAGE_TOKENS)

    def _stop(self) -> None:
        self._model.close()
        self._team.close()

    def set_threads(self, threads: int) -> None:
        if threads != self._threads:
            self._stop()
            self._threads = threads
            self._start()

    def prepare_best(self) -> None:
        if not self._weights.has_screen and self._weights.add_screen():
            self._model.close()
            self._model = self._weights.model(self._team, PAGE_TOKENS)

    def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
        rows = self._rows(segments)
        wanted = sum(segment.num_logits for segment in segments)
        if self._logits.shape[0] < wanted:
            self._logits = torch.empty(wanted, self._shape.vocab, dtype=torch.float32)
        self._model.forward(rows, self._rope, self._logits)
        return self._logits[:wanted]

    def _run_best(self, segments: Sequence[Segment]) -> list[int]:
        if not self._weights.has_screen:
            return super()._run_best(segments)
        return self._model.best(self._rows(segments), self._rope)

    def _rows(self, segments: Sequence[Segment]) -> list[native.Segment]:
        """What the library is called with, once there is room for it."""
        try:
            for segment in segments:
                self._make_room(segment.slot, len(segment.ids))
        except KVMemoryError:
            for segment in segments:
                self._truncate(segment.slot, self._lengths[segment.slot])
            raise
        return [native.Segment(s.ids, self._lengths[s.slot], self._table(s.slot), s.num_logits) for s in segments]

    def _table(self, slot: int) -> ctypes.Array[ctypes.c_void_p]:
        pages = self._pages[slot]
        return (ctypes.c_void_p * len(pages))(*pages)

    def _make_room(self, slot: int, more: int) -> None:
        """Pages for `more` tokens at the end of a slot, its last page its own."""
        pages, length = self._pages[slot], self._lengths[slot]
        if length % PAGE_TOKENS and self._pool.is_shared(pages[-1]):
            own = self._copied(pages[-1])
            self._pool.give_back(pages[-1])
            pages[-1] = own
        for _ in range(-(-(length + more) // PAGE_TOKENS) - len(pages)):
            pages.append(self._pool.take())

    def _copied(self, page: int) -> int:
        copy = self._pool.take()
        ctypes.memmove(copy, page, self._pool.page_bytes)
        return copy

    def _truncate(self, slot: int, length: int) -> None:
        pages = self._pages[slot]
        while len(pages) > -(-length // PAGE_TOKENS):
            self._pool.give_back(pages.pop())

    def _copy_prefix(self, source: int, destination: int, length: int) -> None:
        # The last page, if partly used, is shared too; whoever writes first copies it.
        self._pages[destination] = [self._pool.share(page) for page in self._pages[source][: -(-length // PAGE_TOKENS)]]

    @property
    def capacity_tokens(self) -> int | None:
        pages = self._pool.max_pages
        return None if pages is None else pages * PAGE_TOKENS

    def free_tokens(self) -> int | None:
        free = self._pool.free_pages
        return None if free is None else free * PAGE_TOKENS

    def kv_bytes_in_use(self) -> int:
        return self._pool.pages_in_use * self._pool.page_bytes

    def close(self) -> None:
        self._stop()
        self._pool.close()
        self._weights.close()
