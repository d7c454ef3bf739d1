"""The fused forward on our own CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence

import torch

from autopipe.core.affinity import usable_cores
from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.backends.fused_runner import Runner
from autopipe.core.backends.packed_decoder import PackedDecoder
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.kernels.native import Memory, Segment, Team

PAGE_TOKENS = 256
"""Positions per KV page: the step in which the cache grows."""


class NativeRunner(Runner):
    """One library call per forward; KV cache in pages.

    Args:
        isa: instruction set; None: the best one.
        weights, shared_layers: as of `PackedDecoder`.

    Raises:
        UnsupportedModelError: the state does not fit the config.
        MemoryError: no room for the weights.
    """

    def __init__(
        self,
        shape: DecoderShape,
        state: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        threads: int | None = None,
        isa: str | None = None,
        weights: WeightFormat | None = None,
        shared_layers: Collection[int] = (),
    ) -> None:
        self._run_on(PackedDecoder(shape, state, dtype, isa, weights=weights, shared_layers=shared_layers), threads)

    @classmethod
    def of(cls, weights: PackedDecoder, threads: int | None = None) -> NativeRunner:
        """A runner on weights packed before; it closes them."""
        runner = cls.__new__(cls)
        runner._run_on(weights, threads)
        return runner

    def _run_on(self, weights: PackedDecoder, threads: int | None) -> None:
        self.exact = True
        shape, dtype = weights.shape, weights.dtype
        self._shape, self._dtype = shape, dtype
        self._threads = threads or usable_cores()
        self._weights, self.shortfalls = weights, weights.shortfalls
        self.weight_bytes = self._weights.weight_bytes
        self._pages: list[Memory] = []
        self._page_table = (ctypes.c_void_p * 0)()
        self._rope = shape.rope_tables(0)
        self._logits = torch.empty(0, shape.vocab, dtype=torch.float32)
        self._start()
        self.kv_bytes_per_token = self._model.page_elements * dtype.itemsize // PAGE_TOKENS

    @property
    def description(self) -> str:
        quantised = f", {self._weights.weights.name.lower()} weights" if self._weights.weights.quantised else ""
        shared = self._weights.sharing_note
        return f"native kernels, {self._weights.isa}, {self._threads} threads{quantised}{shared}"

    def _start(self) -> None:
        self._team = Team(self._threads)
        self._model = self._weights.model(self._team, PAGE_TOKENS)

    def set_threads(self, threads: int) -> None:
        if threads != self._threads:
            self._stop()
            self._threads = threads
            self._start()

    def _stop(self) -> None:
        self._model.close()
        self._team.close()

    def use(self, weights: PackedDecoder) -> PackedDecoder:
        """Compute with other weights of the same shape from now on; returns those used so far, not closed."""
        model, before = weights.model(self._team, PAGE_TOKENS), self._weights
        self._model.close()
        self._model, self._weights = model, weights
        self.shortfalls, self.weight_bytes = weights.shortfalls, weights.weight_bytes
        return before

    def prepare_best(self) -> None:
        if not self._weights.has_screen and self._weights.add_screen():
            self._model.close()
            self._model = self._weights.model(self._team, PAGE_TOKENS)

    def best(self, ids: Sequence[int], position: int, num_logits: int) -> list[int]:
        if not self._weights.has_screen:
            return super().best(ids, position, num_logits)
        self._make_room(position + len(ids))
        return self._model.best([Segment(ids, position, self._page_table, num_logits)], self._rope)

    def _make_room(self, length: int) -> None:
        needed = -(-length // PAGE_TOKENS)
        if needed <= len(self._pages):
            return
        page_bytes = self._model.page_elements * self._dtype.itemsize
        while len(self._pages) < needed:
            self._pages.append(Memory(page_bytes))
        self._page_table = (ctypes.c_void_p * needed)(*(page.address for page in self._pages))
        if self._rope[0].shape[0] < needed * PAGE_TOKENS:
            self._rope = self._shape.rope_tables(2 * needed * PAGE_TOKENS)

    def run(self, ids: Sequence[int], position: int, num_logits: int) -> torch.Tensor:
        self._make_room(position + len(ids))
        if self._logits.shape[0] < num_logits:
            self._logits = torch.empty(num_logits, self._shape.vocab, dtype=torch.float32)
        segment = Segment(ids, position, self._page_table, num_logits)
        self._model.forward([segment], self._rope, self._logits)
        return self._logits[:num_logits]

    def close(self) -> None:
        self._stop()
        for page in self._pages:
            page.close()
        self._pages.clear()
        self._weights.close()
