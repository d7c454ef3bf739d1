"""The fused forward on our own CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from autopipe.core.affinity import usable_cores
from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.backends.fused_runner import Runner
from autopipe.core.backends.fused_weights import DecoderTensors, LayerTensors
from autopipe.core.kernels import instruction_set
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.kernels.native import (
    LANES,
    VECTOR_PADDING,
    LayerAddresses,
    Memory,
    ModelAddresses,
    ModelShape,
    NativeModel,
    Segment,
    Team,
    can_screen,
)
from autopipe.core.kernels.packing import pack_matrix, pack_pair, pack_vector, packed_shape
from autopipe.core.kernels.quantise import pack_quantised, pack_quantised_pair, pack_screen, packed_bytes

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
        return self.fill(shape, dtype, lambda memory: memory.copy_(make().reshape(*shape)))

    def fill(self, shape: Sequence[int], dtype: torch.dtype, write: Callable[[torch.Tensor], object]) -> int:
        """As `put`, of a tensor that `write` fills."""
        offset = self.num_bytes
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        self.num_bytes += size + -size % _ALIGNMENT_BYTES
        if self.memory is None:
            return 0
        write(self.memory.tensor(offset, shape, dtype))
        return self.memory.address + offset


class _Layout:
    """Puts a decoder's weights into an arena, in the order a forward reads them."""

    def __init__(self, arena: _Arena, shape: DecoderShape, dtype: torch.dtype, weights: WeightFormat) -> None:
        self.arena, self.shape, self.dtype, self.weights = arena, shape, dtype, weights

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
            qkv=self.matrix(qkv, s.hidden, lambda: torch.cat((tensors.q, tensors.k, tensors.v))),
            output=self.matrix(s.hidden, attended, lambda: tensors.output),
            gate_up=self.pair(2 * intermediate, s.hidden, tensors.gate, tensors.up),
            down=self.matrix(s.hidden, s.intermediate, lambda: tensors.down),
            input_norm=self.vector(s.hidden, lambda: tensors.input_norm),
            mlp_norm=self.vector(s.hidden, lambda: tensors.mlp_norm),
            q_norm=self.optional_vector(tensors.q_norm),
            k_norm=self.optional_vector(tensors.k_norm),
            qkv_bias=self.optional_vector(None if tensors.qkv_bias is None else torch.cat(tensors.qkv_bias)),
        )

    def model(self, tensors: DecoderTensors, outside_embedding: int = 0) -> ModelAddresses:
        s = self.shape
        layers = tuple(self.layer(tensors.layer(index)) for index in range(s.num_layers))
        head = self.head(s.vocab, s.hidden, tensors.head)
        final_norm = self.vector(s.hidden, tensors.final_norm)
        embedding = outside_embedding
        if not embedding and (
            not s.tied or self.weights.quantised
        ):  # an embedding is read by the row: no need to round
            embedding = self.arena.put((s.vocab, s.hidden), self.dtype, tensors.embedding)
        return ModelAddresses(layers, final_norm, head, embedding)


class PackedDecoder:
    """A decoder's weights, packed once for the kernels. Any number of `NativeModel`s may read them.

    Args:
        isa: instruction set; None: the best one.
        embedding: for an untied model, its input embedding, [any vocabulary, hidden] in `dtype`: read where it is
            instead of being copied. Its vocabulary may be larger than that of the head.
        weights: how matrices are packed; quantised beside a bf16 cache and embedding. None: in `dtype`.

    Raises:
        UnsupportedModelError: the state does not fit the config.
        MemoryError: no room for the weights.
    """

    def __init__(
        self,
        shape: DecoderShape,
        state: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        isa: str | None = None,
        embedding: torch.Tensor | None = None,
        weights: WeightFormat | None = None,
    ) -> None:
        self.shape, self.dtype, self.isa = shape, dtype, isa or instruction_set()
        self.weights = weights or WeightFormat.of(dtype)
        self._embedding = embedding
        self._screen: Memory | None = None
        outside = 0 if embedding is None else embedding.data_ptr()
        tensors = DecoderTensors(shape, state, dtype)
        self._arena = _Arena()
        layout = _Layout(self._arena, shape, dtype, self.weights)
        layout.model(tensors, outside)
        self._arena.allocate()
        self._addresses = layout.model(tensors, outside)
        own_embedding = not outside and (not shape.tied or self.weights.quantised)
        embedding_bytes = shape.vocab * shape.hidden * dtype.itemsize if own_embedding else 0
        self.weight_bytes = self._arena.num_bytes - embedding_bytes  # read by a forward; of an embedding, a row

    @property
    def has_screen(self) -> bool:
        return self._addresses.screen != 0

    def add_screen(self) -> bool:
        """Let models made from now on give best logits alone; whether that can be done here."""
        if self.has_screen or not can_screen(self.isa, self.weights):
            return self.has_screen
        packed, norms = pack_screen(self._head())
        self._screen = Memory(packed.nbytes + norms.nbytes)
        self._screen.tensor(0, packed.shape, packed.dtype).copy_(packed)
        self._screen.tensor(packed.nbytes, norms.shape, norms.dtype).copy_(norms)
        self._addresses = replace(
            self._addresses, screen=self._screen.address, screen_norms=self._screen.address + packed.nbytes
        )
        return True

    def _head(self) -> torch.Tensor:
        """The output head, [vocab, hidden], out of its packed form."""
        assert self._arena.memory is not None
        s, offset = self.shape, self._addresses.head - self._arena.memory.address
        blocks, steps, lanes, per_step = shape = packed_shape(s.vocab, s.hidden, self.dtype)
        packed = self._arena.memory.tensor(offset, shape, self.dtype)
        return packed.transpose(1, 2).reshape(blocks * lanes, steps * per_step)[: s.vocab, : s.hidden]

    def model(self, team: Team, page_tokens: int) -> NativeModel:
        """The decoder bound to a team, its KV cache in pages of `page_tokens` positions (a multiple of 32)."""
        s = self.shape
        return NativeModel(
            ModelShape(
                format=self.weights,
                hidden=s.hidden,
                intermediate=s.intermediate,
                num_heads=s.num_heads,
                num_kv_heads=s.num_kv_heads,
                head_dim=s.head_dim,
                vocab=s.vocab,
                page_tokens=page_tokens,
                norm_epsilon=s.norm_epsilon,
                attention_scale=s.attention_scale,
            ),
            self._addresses,
            team,
            self.isa,
        )

    def close(self) -> None:
        for memory in (self._arena.memory, self._screen):
            if memory is not None:
                memory.close()


class NativeRunner(Runner):
    """One library call per forward; KV cache in pages.

    Args:
        isa: instruction set; None: the best one.
        weights: as of `PackedDecoder`.

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
    ) -> None:
        self._run_on(PackedDecoder(shape, state, dtype, isa, weights=weights), threads)

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
        self._weights = weights
        self.weight_bytes = self._weights.weight_bytes
        self._pages: list[Memory] = []
        self._page_table = (ctypes.c_void_p * 0)()
        self._rope = shape.rope_tables(0)
        self._logits = torch.empty(0, shape.vocab)
        self._start()
        self.kv_bytes_per_token = self._model.page_elements * dtype.itemsize // PAGE_TOKENS

    @property
    def description(self) -> str:
        quantised = f", {self._weights.weights.name.lower()} weights" if self._weights.weights.quantised else ""
        return f"native kernels, {self._weights.isa}, {self._threads} threads{quantised}"

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
            self._logits = torch.empty(num_logits, self._shape.vocab)
        segment = Segment(ids, position, self._page_table, num_logits)
        self._model.forward([segment], self._rope, self._logits)
        return self._logits[:num_logits]

    def close(self) -> None:
        self._stop()
        for page in self._pages:
            page.close()
        self._pages.clear()
        self._weights.close()
