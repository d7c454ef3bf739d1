"""A decoder's weights as the kernels read them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch

from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.backends.fused_weights import DecoderTensors
from autopipe.core.backends.packed_adapters import Adapted
from autopipe.core.backends.packed_arena import Arena
from autopipe.core.backends.packed_layers import MappedLayer, map_layer
from autopipe.core.backends.packed_matrices import MatrixPacker
from autopipe.core.errors import ModelLoadError, UnsupportedModelError
from autopipe.core.kernels import instruction_set
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.kernels.native import (
    VECTOR_PADDING,
    Memory,
    NativeModel,
    Team,
    can_screen,
)
from autopipe.core.kernels.packing import pack_vector, packed_shape
from autopipe.core.kernels.quantise import pack_screen
from autopipe.core.kernels.structs import AdapterAddresses, LayerAddresses, ModelAddresses, ModelShape
from autopipe.core.models.adapters import LowRank

_logger = logging.getLogger(__name__)


class _Layout(MatrixPacker):
    """Puts a decoder's weights into an arena, in the order a forward reads them."""

    def __init__(
        self,
        arena: Arena,
        shape: DecoderShape,
        dtype: torch.dtype,
        weights: WeightFormat,
        mapped: Mapping[int, MappedLayer],
        adapters: Mapping[str, LowRank],
    ) -> None:
        super().__init__(arena, shape, dtype, weights)
        self.mapped, self.adapters = mapped, adapters

    def vector(self, size: int, make: Callable[[], torch.Tensor]) -> int:
        return self.arena.put((size + -size % VECTOR_PADDING,), torch.float32, lambda: pack_vector(make()))

    def optional_vector(self, tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else self.vector(tensor.numel(), lambda: tensor)

    def layer(self, index: int, tensors: DecoderTensors) -> LayerAddresses:
        s, layer = self.shape, tensors.layer(index)
        attended, kept = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        mapped = self.mapped.get(index)
        matrices = self.layer_matrices(layer) if mapped is None else mapped.matrices

        def adapter(modules: tuple[str, ...], outputs: tuple[int, ...], inputs: int) -> AdapterAddresses:
            product = Adapted(modules, outputs, inputs, by_turns=len(modules) == 2)
            return product.put(self.arena, self.adapters, f"{tensors.prefix}layers.{index}.", self.dtype)

        projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return LayerAddresses(
            *matrices,
            input_norm=self.vector(s.hidden, lambda: layer.input_norm),
            mlp_norm=self.vector(s.hidden, lambda: layer.mlp_norm),
            q_norm=self.optional_vector(layer.q_norm),
            k_norm=self.optional_vector(layer.k_norm),
            qkv_bias=self.optional_vector(None if layer.qkv_bias is None else torch.cat(layer.qkv_bias)),
            qkv_adapter=adapter(projections, (attended, kept, kept), s.hidden),
            output_adapter=adapter(("self_attn.o_proj",), (s.hidden,), attended),
            gate_up_adapter=adapter(("mlp.gate_proj", "mlp.up_proj"), (s.intermediate,) * 2, s.hidden),
            down_adapter=adapter(("mlp.down_proj",), (s.hidden,), s.intermediate),
        )

    def model(self, tensors: DecoderTensors, outside_embedding: int = 0) -> ModelAddresses:
        s = self.shape
        layers = tuple(self.layer(index, tensors) for index in range(s.num_layers))
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

    Attributes:
        weight_bytes: read by a forward.
        own_bytes: memory of this decoder alone, without a screen.
        shortfalls: what could not be had as asked, in words.

    Args:
        isa: instruction set; None: the best one.
        embedding: for an untied model, its input embedding, [any vocabulary, hidden] in `dtype`: read where it is
            instead of being copied. Its vocabulary may be larger than that of the head.
        weights: how matrices are packed; quantised beside a bf16 cache and embedding. None: in `dtype`.
        shared_layers: layers whose matrices are read from a file of the cache, so that all processes that read them
            have them in memory once. Not quantised ones. Where the cache cannot be written they are packed like the
            others, and `shortfalls` says so.
        adapters: what LoRA adds, by module (`model.layers.0.self_attn.q_proj`, of any layer's matrices); computed
            beside the weights, which stay as they are. Not with quantised weights.

    Raises:
        UnsupportedModelError: the state does not fit the config; or adapters beside quantised weights.
        MemoryError: no room for the weights.
    """

    shortfalls: tuple[str, ...] = ()

    def __init__(
        self,
        shape: DecoderShape,
        state: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        isa: str | None = None,
        embedding: torch.Tensor | None = None,
        weights: WeightFormat | None = None,
        shared_layers: Collection[int] = (),
        adapters: Mapping[str, LowRank] | None = None,
    ) -> None:
        self.shape, self.dtype, self.isa = shape, dtype, isa or instruction_set()
        self.weights = weights or WeightFormat.of(dtype)
        if adapters and self.weights.quantised:
            raise UnsupportedModelError("LoRA beside quantised weights")
        self._embedding = embedding
        self._screen: Memory | None = None
        outside = 0 if embedding is None else embedding.data_ptr()
        tensors = DecoderTensors(shape, state, dtype)
        self._mapped = {} if self.weights.quantised else self._map(tensors, shared_layers)
        self._arena = Arena()
        layout = _Layout(self._arena, shape, dtype, self.weights, self._mapped, adapters or {})
        layout.model(tensors, outside)
        self._arena.allocate()
        self._addresses = layout.model(tensors, outside)
        own_embedding = not outside and (not shape.tied or self.weights.quantised)
        embedding_bytes = shape.vocab * shape.hidden * dtype.itemsize if own_embedding else 0
        self.own_bytes = self._arena.num_bytes
        self.weight_bytes = (
            self.own_bytes + self.shared_bytes - embedding_bytes
        )  # read by a forward; of an embedding, a row

    def _map(self, tensors: DecoderTensors, layers: Collection[int]) -> dict[int, MappedLayer]:
        known = sorted(set(layers) & set(range(self.shape.num_layers)))
        try:
            return {index: map_layer(self.shape, self.dtype, tensors.layer(index)) for index in known}
        except (ModelLoadError, OSError) as error:
            self.shortfalls = (f"layers are not shared between processes: {error}",)
            _logger.warning("%s", self.shortfalls[0])
            return {}

    @property
    def shared_bytes(self) -> int:
        """Weights that other processes may have mapped too."""
        return sum(layer.num_bytes for layer in self._mapped.values())

    @property
    def sharing_note(self) -> str:
        """For a description, in words: what of the weights other processes may read too; empty: nothing."""
        if self.shortfalls:
            return f", {self.shortfalls[0]}"
        return f", {self.shared_bytes / 2**20:.1f} MiB of weights in files that processes share" if self._mapped else ""

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
        self._mapped = {}
