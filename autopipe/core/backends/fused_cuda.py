"""The fused forward on CUDA: the torch decoder as CUDA graphs, one per fixed shape.

Not yet run on a GPU. Its mathematics and its cutting of calls into shapes are tested on the CPU with `graphs=False`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.backends.fused_torch import CHUNK_TOKENS, PaddedRunner, TorchDecoder

_WARMUP_RUNS = 2
"""Eager runs before a capture: libraries choose algorithms and allocate workspaces in them."""


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logits: torch.Tensor


class CudaRunner(PaddedRunner):
    """Graphs by (rows, attention chunks), captured when first needed.

    Exact: one row count, 8; chunk counts are powers of two, and chunks beyond a row add exactly 0 (fused_torch.py), so
    which graph runs does not change a row's bits. Not exact: more row counts. Prefill runs without graphs.

    Args:
        device: `cuda` or `cuda:N`; with graphs=False any device.
        graphs: false computes the same operations one by one.
    """

    def __init__(
        self,
        shape: DecoderShape,
        state: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: str,
        max_length: int,
        exact: bool,
        graphs: bool = True,
    ) -> None:
        super().__init__(TorchDecoder(shape, state, dtype, device, max_length), exact)
        self._use_graphs = graphs
        self._graphs: dict[tuple[int, int], _Graph] = {}

    @property
    def description(self) -> str:
        how = "CUDA graphs" if self._use_graphs else "no graphs"
        return f"{how} on {self.decoder.device}, {'8 rows' if self.exact else 'row buckets'}"

    def make_room(self, length: int) -> None:
        if self.decoder.make_room(length):
            self._graphs.clear()  # they hold the addresses of the old cache

    def chunk_bucket(self, chunks: int) -> int:
        """Chunks a graph visits so as to cover `chunks`: a power of two, within the cache."""
        bucket = 1
        while bucket < chunks:
            bucket *= 2
        return min(bucket, self.decoder.capacity // CHUNK_TOKENS)

    def compute_logits(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, chunks: int
    ) -> torch.Tensor:
        chunks = self.chunk_bucket(chunks)
        if not self._use_graphs:
            return super().compute_logits(ids, positions, slots, chunks)
        key = (ids.shape[0], chunks)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        captured = self._graphs[key]
        captured.ids.copy_(ids)
        captured.positions.copy_(positions)
        captured.slots.copy_(slots)
        captured.graph.replay()
        return captured.logits

    def _capture(self, rows: int, chunks: int) -> _Graph:
        device = torch.device(self.decoder.device)
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        positions = torch.zeros_like(ids)
        slots = torch.full_like(ids, self.decoder.capacity)  # padding only: warming up must not touch the cache
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_RUNS):
                super().compute_logits(ids, positions, slots, chunks)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = super().compute_logits(ids, positions, slots, chunks)
        return _Graph(graph, ids, positions, slots, logits)

    def close(self) -> None:
        self._graphs.clear()
        super().close()
