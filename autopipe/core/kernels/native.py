"""The native library's functions as Python objects: threads, memory, packed matrices, products, decoder models.

Thin wrappers that own what they allocate. Values handed to the library are checked by the callers (the `fused`
backend).
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_int64, c_size_t, c_void_p
from dataclasses import dataclass

import torch

from autopipe.core.errors import AutoPipeError
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.kernels.loader import INSTRUCTION_SETS, instruction_set, library, reason_missing
from autopipe.core.kernels.structs import (
    AdapterAddresses,
    AdapterStruct,
    BestStruct,
    LayerWeightsStruct,
    MatmulJob,
    ModelAddresses,
    ModelDescriptionStruct,
    ModelShape,
    PassStruct,
    SegmentStruct,
)

LANES = 16
"""Outputs per block of a packed matrix."""

VECTOR_PADDING = 32
"""Norm weights and biases are padded with zeros to a multiple of this."""


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "autopipe_allocate": (c_void_p, [c_size_t]),
    "autopipe_free": (None, [c_void_p, c_size_t]),
    "autopipe_team_create": (c_void_p, [ctypes.c_int]),
    "autopipe_team_keep_awake": (None, [c_void_p, ctypes.c_int]),
    "autopipe_team_destroy": (None, [c_void_p]),
    "autopipe_page_elements": (c_size_t, [POINTER(ModelDescriptionStruct)]),
    "autopipe_can_screen": (ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
    "autopipe_model_create": (c_void_p, [POINTER(ModelDescriptionStruct), c_void_p]),
    "autopipe_model_destroy": (None, [c_void_p]),
    "autopipe_forward": (ctypes.c_int, [c_void_p, POINTER(PassStruct)]),
    "autopipe_matmul": (ctypes.c_int, [ctypes.c_int, POINTER(MatmulJob), c_void_p]),
    "autopipe_pack": (
        None,
        [c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, c_void_p, c_size_t, ctypes.c_int],
    ),
    "autopipe_read": (None, [c_void_p, c_size_t, c_void_p]),
}


def native_library() -> ctypes.CDLL:
    """The library with its signatures declared.

    Raises:
        AutoPipeError: there are no kernels to run here; see `kernels.reason_missing`.
    """
    native = library()
    if native is None or instruction_set() is None:
        raise AutoPipeError(f"native CPU kernels are not available: {reason_missing()}")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(native, name)
        function.restype, function.argtypes = result, arguments
    return native


class Memory:
    """Zeroed memory on huge pages where the system has them; freed by `close`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._native = native_library()
        self.address: int = self._native.autopipe_allocate(num_bytes) or 0
        if not self.address:
            raise MemoryError(f"no {num_bytes} bytes left for weights or KV cache")

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A view of this memory; not to be used after `close`."""
        count = int(torch.Size(shape).numel())
        start = self.address + offset
        raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(start)
        return torch.frombuffer(raw, dtype=dtype).view(*shape)

    def close(self) -> None:
        if self.address:
            self._native.autopipe_free(self.address, self.num_bytes)
            self.address = 0

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.close()


class Team:
    """Threads that run one job at a time and sleep in between."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._native = native_library()
        self.handle: int = self._native.autopipe_team_create(threads) or 0
        if not self.handle:
            raise AutoPipeError(f"cannot start {threads} compute threads")

    @contextmanager
    def awake(self) -> Generator[None]:
        """Threads wait for the next job without sleeping meanwhile: waking one takes longer than a short job."""
        self._native.autopipe_team_keep_awake(self.handle, 1)
        try:
            yield
        finally:
            if self.handle:
                self._native.autopipe_team_keep_awake(self.handle, 0)

    def close(self) -> None:
        if self.handle:
            self._native.autopipe_team_destroy(self.handle)
            self.handle = 0

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            self.close()


def matmul(
    x: torch.Tensor,
    packed: torch.Tensor,
    outputs: int,
    team: Team,
    isa: str | None = None,
    weights: WeightFormat | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [rows, inputs], fp32 or bf16, times a packed matrix, as the forward does it; [rows, outputs] of x's dtype.

    Args:
        bias: fp32 [outputs], added before the result is rounded.
        isa: one of `available_instruction_sets()`; None: the one in use.
        weights: how `packed` is packed; None: not quantised, by its dtype.
    """
    native = native_library()
    x = x.contiguous()
    rows, inputs = x.shape
    out = torch.empty(rows, outputs, dtype=x.dtype)
    converted = torch.zeros(rows, inputs + -inputs % VECTOR_PADDING, dtype=torch.float32)
    job = MatmulJob(
        weights or WeightFormat.of(packed.dtype), rows, inputs, outputs, x.dtype is torch.bfloat16, x.data_ptr(),
        packed.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), converted.data_ptr(),
    )  # fmt: skip
    if native.autopipe_matmul(isa_number(isa), ctypes.byref(job), team.handle):
        raise AutoPipeError(f"instruction set {isa!r} is not built in")
    return out


def can_screen(isa: str | None, weights: WeightFormat) -> bool:
    """Whether a model with such weights can have a screen: integer products, and weights of more than 8 bits."""
    return bool(native_library().autopipe_can_screen(isa_number(isa), weights))


def isa_number(isa: str | None) -> int:
    """The C interface's number of an instruction set; None: the one in use."""
    name = isa or instruction_set()
    return INSTRUCTION_SETS.index(name) + 1 if name else 0


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence in a forward.

    Attributes:
        position: of the first of `ids`.
        pages: addresses of the sequence's KV pages, enough for all its tokens.
        num_logits: logits are wanted after so many of the last ids.
    """

    ids: Sequence[int]
    position: int
    pages: ctypes.Array[c_void_p]
    num_logits: int


class NativeModel:
    """A decoder bound to a team. The weights behind the addresses must outlive it."""

    def __init__(self, shape: ModelShape, weights: ModelAddresses, team: Team, isa: str | None = None) -> None:
        self._native = native_library()
        self._layers = (LayerWeightsStruct * len(weights.layers))()
        for index, layer in enumerate(weights.layers):
            for field, value in vars(layer).items():
                if isinstance(value, AdapterAddresses):
                    setattr(self._layers[index], field, AdapterStruct(*vars(value).values()))
                else:
                    setattr(self._layers[index], field, value or None)
        self._description = ModelDescriptionStruct(
            isa_number(isa), shape.format, len(weights.layers), shape.hidden, shape.intermediate,
            shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.vocab, shape.page_tokens,
            shape.norm_epsilon, shape.attention_scale,
            self._layers, weights.final_norm, weights.head, weights.embedding or None,
            weights.screen or None, weights.screen_norms or None,
        )  # fmt: skip
        self._team = team
        self.handle: int = self._native.autopipe_model_create(ctypes.byref(self._description), team.handle) or 0
        if not self.handle:
            raise MemoryError("no memory left for activations")

    @property
    def page_elements(self) -> int:
        """Numbers in one KV page (all layers, keys and values, padding included)."""
        return int(self._native.autopipe_page_elements(ctypes.byref(self._description)))

    def forward(
        self, segments: Sequence[Segment], rope: tuple[torch.Tensor, torch.Tensor], logits: torch.Tensor
    ) -> None:
        """Append each segment to its sequence; write the wanted logits to `logits` [sum of num_logits, vocab].

        Args:
            segments: at least one, of different sequences, with at least one id each.
            rope: cosines and sines, fp32 [positions, head_dim / 2] each.
        """
        self._pass(segments, rope, logits.data_ptr(), None)

    def best(self, segments: Sequence[Segment], rope: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
        """As `forward`, but of each row of logits only the lowest id of the largest; -1: it holds no number.

        The weights must have a screen.
        """
        best = (BestStruct * sum(segment.num_logits for segment in segments))()
        self._pass(segments, rope, None, best)
        return [found.id for found in best]

    def _pass(
        self,
        segments: Sequence[Segment],
        rope: tuple[torch.Tensor, torch.Tensor],
        logits: int | None,
        best: ctypes.Array[BestStruct] | None,
    ) -> None:
        ids: list[int] = []
        logit_rows: list[int] = []
        for segment in segments:
            ids += segment.ids
            logit_rows += range(len(ids) - segment.num_logits, len(ids))
        parts = (SegmentStruct * len(segments))(*(SegmentStruct(len(s.ids), s.position, s.pages) for s in segments))
        call = PassStruct(
            (c_int64 * len(ids))(*ids), parts, len(segments),
            rope[0].data_ptr(), rope[1].data_ptr(),
            (c_int64 * len(logit_rows))(*logit_rows), len(logit_rows), logits, best,
        )  # fmt: skip
        if self._native.autopipe_forward(self.handle, ctypes.byref(call)):
            raise MemoryError("no memory left for attention scores")

    def close(self) -> None:
        if self.handle:
            self._native.autopipe_model_destroy(self.handle)
            self.handle = 0

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            self.close()
