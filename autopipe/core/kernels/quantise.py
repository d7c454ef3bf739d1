"""Weights in 8 and 4 bits, packed for the kernels: see quantised.h for the layout.

Both have a scale for every 32 inputs. int8: symmetric. int4: with a minimum, which is the scheme of GGML's Q4_1, so
models that come from such a file nearly keep their weights.
"""

from __future__ import annotations

import torch

from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.kernels.native import LANES

_ABOVE = 1.0001
"""Norms of fp32 numbers are off by less."""
_NEVER = 1e30
_ROWS_AT_A_TIME = 2048
"""A multiple of 16, few enough for the cache."""
GROUPS = {WeightFormat.INT8: 32, WeightFormat.INT4: 32}
"""Inputs that share a scale."""


def packed_bytes(outputs: int, inputs: int, weights: WeightFormat) -> tuple[int, int]:
    """Shape of a packed matrix: blocks of 16 outputs, bytes of a block."""
    group = GROUPS[weights]
    groups = -(-inputs // group)
    scales = groups * LANES * 2 * (2 if weights is WeightFormat.INT4 else 1)
    return -(-outputs // LANES), scales + -scales % 64 + groups * group * LANES // (
        2 if weights is WeightFormat.INT4 else 1
    )


def pack_quantised(weight: torch.Tensor, weights: WeightFormat) -> torch.Tensor:
    """[outputs, inputs] to uint8 [blocks, bytes of a block], zero padded."""
    return _pack_codes(*quantise(weight, weights), weights)


def _pack_codes(codes: torch.Tensor, scales: torch.Tensor, weights: WeightFormat) -> torch.Tensor:
    """What `quantise` gave, packed."""
    outputs, groups, group = codes.shape
    blocks, num_bytes = packed_bytes(outputs, groups * group, weights)
    per_step = 4 if weights is WeightFormat.INT8 else 8
    steps = codes.view(blocks, LANES, groups * group // per_step, per_step).transpose(1, 2)
    if weights is WeightFormat.INT4:
        steps = steps[..., :4] | (steps[..., 4:] << 4)
    head = scales.view(blocks, LANES, groups, -1).permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(blocks, -1)
    head = torch.nn.functional.pad(head, (0, -head.shape[1] % 64))
    packed = torch.cat((head, steps.reshape(blocks, -1)), dim=1)
    assert packed.shape == (blocks, num_bytes)
    return packed


def pack_quantised_pair(gate: torch.Tensor, up: torch.Tensor, weights: WeightFormat) -> torch.Tensor:
    """Two matrices of one shape packed block by block by turns: gate 0, up 0, gate 1, ..."""
    return torch.stack((pack_quantised(gate, weights), pack_quantised(up, weights)), dim=1).flatten(0, 1)


def quantise(weight: torch.Tensor, weights: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as stored, and their scales, of a matrix padded to whole blocks and groups.

    Returns:
        uint8 [outputs, groups, group], and bf16 [outputs, groups, 1] (int8: scale) or [.., 2] (int4: scale, minimum).
    """
    group = GROUPS[weights]
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inputs % group, 0, -outputs % LANES))
    values = padded.view(padded.shape[0], -1, group)
    if weights is WeightFormat.INT8:
        scale = _up_to_bf16(values.abs().amax(-1, keepdim=True) / 127)
        codes = (values / scale.float().clamp_min(_TINY)).round().clamp(-127, 127) + 128
        return codes.to(torch.uint8), scale
    low = values.amin(-1, keepdim=True).to(torch.bfloat16)
    scale = _up_to_bf16((values.amax(-1, keepdim=True) - low.float()) / 15)
    codes = ((values - low.float()) / scale.float().clamp_min(_TINY)).round().clamp(0, 15)
    return codes.to(torch.uint8), torch.cat((scale, low), dim=-1)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, weights: WeightFormat) -> torch.Tensor:
    """The weights that `quantise` stands for, fp32 [outputs, inputs], padding included."""
    if weights is WeightFormat.INT8:
        values = (codes.float() - 128) * scales.float()
    else:
        values = codes.float() * scales[..., :1].float() + scales[..., 1:].float()
    return values.flatten(1)


_TINY = 1e-30


def _up_to_bf16(scale: torch.Tensor) -> torch.Tensor:
    """The next bf16 at or above: so that no code needs to be clipped."""
    rounded = scale.to(torch.bfloat16)
    bits = rounded.view(torch.int16) + (rounded.float() < scale).to(torch.int16)
    return bits.view(torch.bfloat16)


def pack_screen(head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An output head [vocab, hidden] in int8, and what bounds how far its logits are off (see screen.h).

    Returns:
        uint8 [blocks, bytes of a block], and fp32 [2, vocab padded to whole blocks]: norms of the coarse rows, and of
        what they are off by, both a little too large. A row of padding is off by so much that it is never the best.
    """
    packed, norms = [], []
    for rows in torch.split(head, _ROWS_AT_A_TIME):
        codes, scales = quantise(rows, WeightFormat.INT8)
        coarse = dequantise(codes, scales, WeightFormat.INT8)  # [padded rows, padded hidden]
        off = torch.nn.functional.pad(rows.float(), (0, coarse.shape[1] - rows.shape[1], 0, len(coarse) - len(rows)))
        norms.append(torch.stack((coarse.norm(dim=1), off.sub_(coarse).norm(dim=1))) * _ABOVE)
        packed.append(_pack_codes(codes, scales, WeightFormat.INT8))
    bounds = torch.cat(norms, dim=1)
    bounds[1, len(head) :] = _NEVER
    return torch.cat(packed), bounds
