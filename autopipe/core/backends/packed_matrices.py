"""Matrices on their way into the kernels' layout: into a decoder's own memory, or into a file that processes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.backends.fused_weights import LayerTensors
from autopipe.core.backends.packed_arena import Arena
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.kernels.native import LANES
from autopipe.core.kernels.packing import pack_matrix, pack_pair, packed_shape
from autopipe.core.kernels.quantise import pack_quantised, pack_quantised_pair, packed_bytes


class LayerMatrices(NamedTuple):
    """Addresses of a layer's matrices, in the order of `LayerAddresses`."""

    qkv: int
    output: int
    gate_up: int
    down: int


class MatrixPacker:
    """Puts matrices into an arena.

    Args:
        dtype: of numbers that are not quantised.
        weights: how matrices are packed.
    """

    def __init__(self, arena: Arena, shape: DecoderShape, dtype: torch.dtype, weights: WeightFormat) -> None:
        self.arena, self.shape, self.dtype, self.weights = arena, shape, dtype, weights

    def layer_matrices(self, layer: LayerTensors) -> LayerMatrices:
        s = self.shape
        attended = s.num_heads * s.head_dim
        qkv = attended + 2 * s.num_kv_heads * s.head_dim
        intermediate = s.intermediate + -s.intermediate % LANES
        return LayerMatrices(
            qkv=self.matrix(qkv, s.hidden, lambda: torch.cat((layer.q, layer.k, layer.v))),
            output=self.matrix(s.hidden, attended, lambda: layer.output),
            gate_up=self.pair(2 * intermediate, s.hidden, layer.gate, layer.up),
            down=self.matrix(s.hidden, s.intermediate, lambda: layer.down),
        )

    def matrix(self, outputs: int, inputs: int, make: Callable[[], torch.Tensor]) -> int:
        return self._matrix(outputs, inputs, self.weights, make)

    def pair(self, outputs: int, inputs: int, gate: torch.Tensor, up: torch.Tensor) -> int:
        """Two matrices, their blocks by turns; `outputs` of both together."""
        if self.weights.quantised:
            blocks, num_bytes = packed_bytes(outputs, inputs, self.weights)
            return self.arena.put((blocks, num_bytes), torch.uint8, lambda: pack_quantised_pair(gate, up, self.weights))
        shape = packed_shape(outputs, inputs, self.dtype)
        return self.arena.fill(shape, self.dtype, lambda memory: pack_pair(gate, up, memory))

    def head(self, outputs: int, inputs: int, make: Callable[[], torch.Tensor]) -> int:
        weights = WeightFormat.INT8 if self.weights is WeightFormat.INT4 else self.weights  # see quantised.h
        return self._matrix(outputs, inputs, weights, make)

    def _matrix(self, outputs: int, inputs: int, weights: WeightFormat, make: Callable[[], torch.Tensor]) -> int:
        if weights.quantised:
            sizes = packed_bytes(outputs, inputs, weights)
            return self.arena.put(sizes, torch.uint8, lambda: pack_quantised(make(), weights))
        shape = packed_shape(outputs, inputs, self.dtype)
        return self.arena.fill(shape, self.dtype, lambda memory: pack_matrix(make(), memory))
