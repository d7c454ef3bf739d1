"""How much memory a stage takes, and what of it: weights, KV cache, activations, the process itself."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.core.placement.hardware import Device
from autopipe.core.placement.sizes import ModelSizes
from autopipe.core.plan import FEWER_BITS, MAX_WINDOW, Dtype

MAX_SHARE = 0.8
"""Most of a device's memory that models may take; the rest is for fragmentation and for programs that start later."""

BYTES_PER_NUMBER = {Dtype.FP32: 4.0, Dtype.BF16: 2.0, Dtype.FP16: 2.0, Dtype.INT8: 1.0, Dtype.INT4: 0.5}
_SCALE_BYTES = {Dtype.INT8: 2 / 32, Dtype.INT4: 4 / 32}
"""Of scales, for each weight, where our CPU kernels quantise (kernels/quantised.h)."""
_LIBRARY_SCALE_BYTES = 4 / 64
"""The same of bitsandbytes (`blocksize` 64), and about that of torchao."""
_CPU_PAGE_TOKENS = 256
_CPU_ROWS = 256
"""Rows the CPU kernels have room for at once."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one stage on one device, by what they are for.

    `process`: before any weights: interpreter and libraries, or a CUDA context.
    """

    weights: int = 0
    kv: int = 0
    activations: int = 0
    process: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.process

    def __add__(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(
            self.weights + other.weights,
            self.kv + other.kv,
            self.activations + other.activations,
            self.process + other.process,
        )


def matrix_bytes(num_weights: int, dtype: Dtype, *, on_cpu: bool) -> int:
    """Bytes of a matrix's weights, scales included where it is quantised."""
    scales = 0.0
    if dtype in _SCALE_BYTES:
        scales = num_weights * (_SCALE_BYTES[dtype] if on_cpu else _LIBRARY_SCALE_BYTES)
    return int(num_weights * BYTES_PER_NUMBER[dtype] + scales)


def layer_bytes(sizes: ModelSizes, dtype: Dtype, *, on_cpu: bool) -> int:
    """Weights of one layer; norms and biases stay fp32."""
    matrices = matrix_bytes(sizes.matrix_parameters_per_layer, dtype, on_cpu=on_cpu)
    return matrices + 4 * sizes.vector_parameters_per_layer


def head_bytes(sizes: ModelSizes, dtype: Dtype, *, on_cpu: bool) -> int:
    """The output head. Our kernels keep it in 8 bits at least, libraries for GPUs in 16."""
    kept = Dtype.INT8 if dtype is Dtype.INT4 and on_cpu else dtype if on_cpu else _unquantised(dtype)
    return matrix_bytes(sizes.embedding_parameters, kept, on_cpu=on_cpu)


def embedding_bytes(sizes: ModelSizes, dtype: Dtype, *, on_cpu: bool) -> int:
    """The embedding; 0 where the head serves as one. Read by the row, so never quantised."""
    if sizes.tied and not (on_cpu and dtype in _SCALE_BYTES):
        return 0
    return matrix_bytes(sizes.embedding_parameters, _unquantised(dtype), on_cpu=on_cpu)


def weight_bytes(sizes: ModelSizes, dtype: Dtype, *, on_cpu: bool) -> int:
    """All weights of a model."""
    ends = head_bytes(sizes, dtype, on_cpu=on_cpu) + embedding_bytes(sizes, dtype, on_cpu=on_cpu)
    return sizes.num_layers * layer_bytes(sizes, dtype, on_cpu=on_cpu) + ends


def streamed_bytes(sizes: ModelSizes, dtype: Dtype, *, on_cpu: bool) -> int:
    """Weights that a forward reads: all but the embedding."""
    return weight_bytes(sizes, dtype, on_cpu=on_cpu) - embedding_bytes(sizes, dtype, on_cpu=on_cpu)


def kv_bytes_per_token(sizes: ModelSizes, dtype: Dtype, num_layers: int | None = None) -> int:
    """KV entries of one position in `num_layers` layers (None: all); in 16 bits where weights have fewer."""
    layers = sizes.num_layers if num_layers is None else num_layers
    return int(layers * sizes.kv_numbers_per_token_and_layer * BYTES_PER_NUMBER[_unquantised(dtype)])


def memory_use(
    sizes: ModelSizes,
    dtype: Dtype,
    device: Device,
    *,
    context: int,
    layers: int | None = None,
    has_embedding: bool = True,
    has_head: bool = True,
    rows: int = MAX_WINDOW + 1,
) -> MemoryUse:
    """Bytes of a stage, or of the part of it that is on `device`.

    Args:
        context: longest sequence, in tokens.
        layers: layers on this device; None: all.
        has_embedding, has_head: whether these are on this device.
        rows: most tokens of a forward: a window and one more.
    """
    on_cpu = device.spec.is_cpu
    count = sizes.num_layers if layers is None else layers
    head = head_bytes(sizes, dtype, on_cpu=on_cpu)
    weights = count * layer_bytes(sizes, dtype, on_cpu=on_cpu)
    if has_head:
        weights += head
    if has_embedding:
        weights += embedding_bytes(sizes, dtype, on_cpu=on_cpu)
    if on_cpu:
        rows = _CPU_ROWS
        context += -context % _CPU_PAGE_TOKENS
    width = 2 * sizes.hidden + (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim + 2 * sizes.intermediate
    activations = 4 * rows * (width + (sizes.vocab if has_head and not on_cpu else 0))
    process = device.context_bytes
    if on_cpu:
        process += head  # packing copies a matrix; the allocator keeps the room of the largest one
        activations += 4 * 8 * sizes.vocab
    return MemoryUse(weights, context * kv_bytes_per_token(sizes, dtype, count), activations, process)


def _unquantised(dtype: Dtype) -> Dtype:
    return Dtype.BF16 if dtype in FEWER_BITS else dtype


def gigabytes(num_bytes: float) -> str:
    """Bytes for people, in powers of ten: `1.4 GB`, `52 MB`, `328 kB`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"
