"""Brings weights into the kernels' layout (see model.h)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopipe.core.affinity import usable_cores
from autopipe.core.errors import AutoPipeError
from autopipe.core.kernels.native import LANES, VECTOR_PADDING, native_library


def packed_shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Of a packed matrix [outputs, inputs], zero padded: bf16 [outputs/16, inputs/2, 16, 2], fp32 [outputs/16, inputs,
    16, 1]."""
    per_step = 2 if dtype == torch.bfloat16 else 1
    return -(-outputs // LANES), -(-inputs // per_step), LANES, per_step


def pack_matrix(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[outputs, inputs], bf16 or fp32, to the kernels' layout: see `packed_shape`.

    Args:
        out: where to, contiguous, of the result's size and dtype; None: new memory.

    Raises:
        AutoPipeError: another dtype, or `out` does not fit.
    """
    return _pack([weight], out)


def pack_pair(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `pack_matrix`: two matrices of one shape, block by block by turns: gate 0, up 0, gate 1, ..."""
    return _pack([gate, up], out)


def _pack(matrices: Sequence[torch.Tensor], out: torch.Tensor | None) -> torch.Tensor:
    (outputs, inputs), dtype = matrices[0].shape, matrices[0].dtype
    blocks, *block = packed_shape(outputs, inputs, dtype)
    shape = (len(matrices) * blocks, *block)
    out = torch.empty(shape, dtype=dtype) if out is None else out.view(shape)
    if dtype not in (torch.bfloat16, torch.float32) or out.dtype != dtype or not out.is_contiguous():
        raise AutoPipeError(f"matrices of {dtype} cannot be packed into {out.dtype}, only bf16 or fp32 into the same")
    if any(matrix.shape != matrices[0].shape or matrix.dtype != dtype for matrix in matrices):
        raise AutoPipeError("matrices that are packed together are of one shape and dtype")
    block_bytes = out[0].numel() * dtype.itemsize
    for turn, matrix in enumerate(matrices):
        whole = matrix.contiguous()
        native_library().autopipe_pack(
            whole.data_ptr(), dtype.itemsize, outputs, inputs, out.data_ptr() + turn * block_bytes,
            len(matrices) * block_bytes, usable_cores(),
        )  # fmt: skip
    return out


def pack_vector(vector: torch.Tensor) -> torch.Tensor:
    """fp32, padded with zeros."""
    return torch.nn.functional.pad(vector.float(), (0, -vector.numel() % VECTOR_PADDING))
