"""A decoder's forward for training on a CPU: sequences one after another without padding, few passes over memory.

The family is that of the `fused` backend (Llama, SmolLM2, Mistral, Qwen2, Qwen3). Everything is fp32: matrix products
are bound by arithmetic here, and without AMX bf16 products are slower than fp32 ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from autopipe.core.backends.fused_config import DecoderShape


@dataclass(frozen=True)
class Block:
    """Weights of one layer, matrices [outputs, inputs].

    Attributes:
        qkv: rows of q, k and v one after another; gate_up: rows of gate, then of up.
        q_norm, k_norm, qkv_bias: None where the family has none.
    """

    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None


def hidden_states(
    shape: DecoderShape, blocks: Sequence[Block], embedded: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """The residual stream after the last block, before the final norm.

    Args:
        embedded: input embeddings of all sequences, one after another, [sum(lengths), hidden].
        lengths: tokens of each sequence; none attends to another.
    """
    cos, sin = shape.rope_tables(max(lengths))
    cos = torch.cat([cos[:length] for length in lengths])[:, None]  # [n, 1, head_dim / 2]
    sin = torch.cat([sin[:length] for length in lengths])[:, None]
    x = embedded
    for block in blocks:
        x = x + functional.linear(_attend(shape, block, x, lengths, cos, sin), block.output)
        normed = rms_norm(x, block.mlp_norm, shape.norm_epsilon)
        x = x + functional.linear(swi_glu(functional.linear(normed, block.gate_up)), block.down)
    return x


def _attend(
    shape: DecoderShape,
    block: Block,
    x: torch.Tensor,
    lengths: Sequence[int],
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Attention of one layer, before its output projection, [n, num_heads * head_dim]."""
    heads, kv_heads, d, n = shape.num_heads, shape.num_kv_heads, shape.head_dim, x.shape[0]
    normed = rms_norm(x, block.input_norm, shape.norm_epsilon)
    qkv = functional.linear(normed, block.qkv, block.qkv_bias).view(n, heads + 2 * kv_heads, d)
    queries, keys, values = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    if block.q_norm is not None and block.k_norm is not None:
        queries = rms_norm(queries, block.q_norm, shape.norm_epsilon)
        keys = rms_norm(keys, block.k_norm, shape.norm_epsilon)
    queries, keys = _rotated(queries, cos, sin), _rotated(keys, cos, sin)
    pieces = []
    by_sequence = (torch.split(tensor, list(lengths)) for tensor in (queries, keys, values))
    for q, k, v in zip(*by_sequence, strict=True):
        attended = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True
        )
        pieces.append(attended[0].transpose(0, 1))  # [length, heads, d]
    return torch.cat(pieces).reshape(n, heads * d)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (arXiv 2104.09864) of [n, heads, head_dim], halves paired as transformers pairs them."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension (arXiv 1910.07467)."""
    normed: torch.Tensor = _RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normed


def swi_glu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [n, 2 * intermediate], gate first (arXiv 2002.05202)."""
    gated: torch.Tensor = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]
    return gated


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        size = x.shape[-1]
        norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(size).add_(epsilon).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, weight, inverse)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        unit, weight, inverse = ctx.saved_tensors
        gradient = gradients[0]
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = (gradient * unit).reshape(-1, unit.shape[-1]).sum(0)
        scaled = gradient * weight
        along = (scaled * unit).mean(-1, keepdim=True)
        return scaled.sub_(unit * along).mul_(inverse), weight_grad, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        ctx.save_for_backward(gate_up, sigmoid)
        return (gate * sigmoid).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gate_up, sigmoid = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        gate_grad, up_grad = result.chunk(2, dim=-1)
        silu = gate * sigmoid
        torch.mul(gradients[0], silu, out=up_grad)
        # d silu / d gate = sigmoid + silu * (1 - sigmoid)
        gate_grad.copy_(silu.sub_(silu * sigmoid).add_(sigmoid).mul_(up).mul_(gradients[0]))
        return result
