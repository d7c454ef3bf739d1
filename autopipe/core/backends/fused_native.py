"""The fused forward on our own CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch

from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.backends.fused_runner import Runner
from autopipe.core.backends.fused_weights import DecoderTensors, LayerTensors
from autopipe.core.kernels import instruction_set
from autopipe.core.kernels.native import (
    LANES,
    VECTOR_PADDING,
    LayerAddresses,
    Memory,
    ModelAddresses,
    ModelShape,
    NativeModel,
    Team,
    default_threads,
    pack_matrix,
    pack_pair,
    pack_vector,
)

PAGE_TOKENS = 256
"""Positions per KV page: the step in which the cache grows."""

_ALIGNMENT_BYTES = 64


class _Arena:
    """Packed tensors one after another in one allocation: made once to learn the size, once to fill it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.memory: Memory | None = None

    def allocate(self) -> None:
        self.memory, self.num_bytes = Memory(self.num_bytes), 0

    def put(self, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> int:
        """Address of the tensor made by `make` (only its size counts before `allocate`)."""
        offset = self.num_bytes
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        self.num_bytes += size + -size % _ALIGNMENT_BYTES
        if self.memory is None:
            return 0
        self.memory.tensor(offset, shape, dtype).copy_(make().reshape(*shape))
        return self.memory.address + offset


def _matrix_shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, int]:
    per_step = 2 if dtype == torch.bfloat16 else 1
    return outputs + -outputs % 16, inputs + -inputs % per_step


class _Layout:
    """Puts a decoder's weights into an arena, in the order a forward reads them."""

    def __init__(self, arena: _Arena, shape: DecoderShape, dtype: torch.dtype) -> None:
        self.arena, self.shape, self.dtype = arena, shape, dtype

    def matrix(self, outputs: int, inputs: int, make: Callable[[], torch.Tensor]) -> int:
        per_step = 2 if self.dtype == torch.bfloat16 else 1
        padded = (outputs + -outputs % LANES, inputs + -inputs % per_step)
        return self.arena.put(padded, self.dtype, make)

    def vector(self, size: int, make: Callable[[], torch.Tensor]) -> int:
        return self.arena.put((size + -size % VECTOR_PADDING,), torch.float32, lambda: pack_vector(make()))

    def optional_vector(self, tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else self.vector(tensor.numel(), lambda: tensor)

    def layer(self, tensors: LayerTensors) -> LayerAddresses:
        s = self.shape
        attended = s.num_heads * s.head_dim
        qkv = attended + 2 * s.num_kv_heads * s.head_dim
        intermediate = s.intermediate + -s.intermediate % LANES
        return LayerAddresses(
            qkv=self.matrix(qkv, s.hidden, lambda: pack_matrix(torch.cat((tensors.q, tensors.k, tensors.v)))),
            output=self.matrix(s.hidden, attended, lambda: pack_matrix(tensors.output)),
            gate_up=self.matrix(2 * intermediate, s.hidden, lambda: pack_pair(tensors.gate, tensors.up)),
            down=self.matrix(s.hidden, s.intermediate, lambda: pack_matrix(tensors.down)),
            input_norm=self.vector(s.hidden, lambda: tensors.input_norm),
            mlp_norm=self.vector(s.hidden, lambda: tensors.mlp_norm),
            q_norm=self.optional_vector(tensors.q_norm),
            k_norm=self.optional_vector(tensors.k_norm),
            qkv_bias=self.optional_vector(None if tensors.qkv_bias is None else torch.cat(tensors.qkv_bias)),
        )

    def model(self, tensors: DecoderTensors) -> ModelAddresses:
        s = self.shape
        layers = tuple(self.layer(tensors.layer(index)) for index in range(s.num_layers))
        head = self.matrix(s.vocab, s.hidden, lambda: pack_matrix(tensors.head()))
        final_norm = self.vector(s.hidden, tensors.final_norm)
        embedding = 0 if s.tied else self.arena.put((s.vocab, s.hidden), self.dtype, tensors.embedding)
        return ModelAddresses(layers, final_norm, head, embedding)


class NativeRunner(Runner):
    """Weights packed once; one library call per forward; KV cache in pages.

    Args:
        isa: instruction set; None: the best one.

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
    ) -> None:
        self.exact = True
        self._shape, self._dtype, self._isa = shape, dtype, isa or instruction_set()
        self._threads = threads or default_threads()
        tensors = DecoderTensors(shape, state, dtype)
        self._arena = _Arena()
        layout = _Layout(self._arena, shape, dtype)
        layout.model(tensors)
        self._arena.allocate()
        self._addresses = layout.model(tensors)
        embedding_bytes = 0 if shape.tied else shape.vocab * shape.hidden * dtype.itemsize
        self.weight_bytes = self._arena.num_bytes - embedding_bytes  # read by a forward; of an embedding, a row
        self._pages: list[Memory] = []
        self._page_table = (ctypes.c_void_p * 0)()
        self._rope = shape.rope_tables(0)
        self._logits = torch.empty(0, shape.vocab)
        self._start()
        self.kv_bytes_per_token = self._model.page_elements * dtype.itemsize // PAGE_TOKENS

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"native kernels, {self._isa}, {self._threads} threads"

    def _start(self) -> None:
        s = self._shape
        self._team = Team(self._threads)
        self._model = NativeModel(
            ModelShape(
                bf16=self._dtype == torch.bfloat16,
                hidden=s.hidden,
                intermediate=s.intermediate,
                num_heads=s.num_heads,
                num_kv_heads=s.num_kv_heads,
                head_dim=s.head_dim,
                vocab=s.vocab,
                page_tokens=PAGE_TOKENS,
                norm_epsilon=s.norm_epsilon,
                attention_scale=s.attention_scale,
            ),
            self._addresses,
            self._team,
            self._isa,
        )

    def set_threads(self, threads: int) -> None:
        if threads != self._threads:
            self._stop()
            self._threads = threads
            self._start()

    def _stop(self) -> None:
        self._model.close()
        self._team.close()

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
            self._logits = torch.empty(num_logits, self._shape.vocab)
        self._model.forward(ids, position, self._page_table, self._rope, len(ids) - num_logits, self._logits)
        return self._logits[:num_logits]

    def close(self) -> None:
        self._stop()
        for page in self._pages:
            page.close()
        self._pages.clear()
        if self._arena.memory is not None:
            self._arena.memory.close()
