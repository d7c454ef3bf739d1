"""The fused forward on CUDA: the torch decoder as CUDA graphs, one per fixed shape.

Not yet run on a GPU. Its mathematics, its cutting of calls into shapes and its way on when a graph cannot be captured
are tested on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.backends.fused_torch import CHUNK_TOKENS, PaddedRunner, TorchDecoder

_log = logging.getLogger(__name__)

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
            try:
                self._graphs[key] = self._capture(*key)
            except RuntimeError as error:  # torch's errors of CUDA, memory included
                self._without_graphs(error)
                return super().compute_logits(ids, positions, slots, chunks)
        captured = self._graphs[key]
        captured.ids.copy_(ids, non_blocking=True)
        captured.positions.copy_(positions, non_blocking=True)
        captured.slots.copy_(slots)
        captured.graph.replay()
        return captured.logits

    def _capture(self, rows: int, chunks: int) -> _Graph:
        device = torch.device(self.decoder.device)
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        positions = torch.zeros_like(ids)
        slots = torch.full_like(ids, self.decoder.capacity)  # padding only: warming up must not touch the cache
        current = torch.cuda.current_stream(device)
        # On this device, whichever is torch's current one, and with the priority that the plan gave the stage's stream.
        stream = torch.cuda.Stream(device, priority=current.priority)  # type: ignore[no-untyped-call]  # untyped in torch
        with torch.cuda.device(device):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(_WARMUP_RUNS):
                    super().compute_logits(ids, positions, slots, chunks)
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                logits = super().compute_logits(ids, positions, slots, chunks)
        return _Graph(graph, ids, positions, slots, logits)

    def _without_graphs(self, error: RuntimeError) -> None:
        """Go on operation by operation."""
        reason = f"no CUDA graphs: {error}"
        _log.warning("%s", reason)
        self._use_graphs, self.shortfalls = False, (*self.shortfalls, reason)
        self._graphs.clear()

    def close(self) -> None:
        self._graphs.clear()
        super().close()
