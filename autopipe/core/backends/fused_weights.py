"""Takes a decoder's tensors out of a state dict, checked, with q/k/v and gate/up still separate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.errors import UnsupportedModelError


@dataclass(frozen=True)
class LayerTensors:
    """One layer. Matrices are [outputs, inputs]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv_bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


class DecoderTensors:
    """Tensors of a state dict with transformers' names, converted to `dtype` one layer at a time.

    Attributes:
        prefix: of the names in front of `layers`.

    Raises:
        UnsupportedModelError: a tensor is missing, has another shape or is not of floating point (quantised);
            the message names it.
    """

    def __init__(self, shape: DecoderShape, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.shape = shape
        self._state = state
        self._dtype = dtype
        self.prefix = "model." if "model.embed_tokens.weight" in state else ""

    def _take(self, name: str, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._state.get(name)
        if tensor is None:
            raise UnsupportedModelError(f"tensor {name} is missing; the fused backend needs transformers' names")
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise UnsupportedModelError(f"tensor {name} is {tensor.dtype}; only fp32, bf16 and fp16 can be used")
        if tuple(tensor.shape) != sizes:
            raise UnsupportedModelError(f"tensor {name} is {tuple(tensor.shape)}; the config says {sizes}")
        return tensor.detach().to(device="cpu", dtype=dtype or self._dtype)

    def layer(self, index: int) -> LayerTensors:
        s, prefix = self.shape, f"{self.prefix}layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        fp32 = torch.float32
        return LayerTensors(
            q=self._take(attention + "q_proj.weight", queries, s.hidden),
            k=self._take(attention + "k_proj.weight", keys, s.hidden),
            v=self._take(attention + "v_proj.weight", keys, s.hidden),
            output=self._take(attention + "o_proj.weight", s.hidden, queries),
            gate=self._take(mlp + "gate_proj.weight", s.intermediate, s.hidden),
            up=self._take(mlp + "up_proj.weight", s.intermediate, s.hidden),
            down=self._take(mlp + "down_proj.weight", s.hidden, s.intermediate),
            input_norm=self._take(prefix + "input_layernorm.weight", s.hidden, dtype=fp32),
            mlp_norm=self._take(prefix + "post_attention_layernorm.weight", s.hidden, dtype=fp32),
            qkv_bias=(
                self._take(attention + "q_proj.bias", queries, dtype=fp32),
                self._take(attention + "k_proj.bias", keys, dtype=fp32),
                self._take(attention + "v_proj.bias", keys, dtype=fp32),
            )
            if s.qkv_bias
            else None,
            q_norm=self._take(attention + "q_norm.weight", s.head_dim, dtype=fp32) if s.qk_norm else None,
            k_norm=self._take(attention + "k_norm.weight", s.head_dim, dtype=fp32) if s.qk_norm else None,
        )

    def final_norm(self) -> torch.Tensor:
        return self._take(self.prefix + "norm.weight", self.shape.hidden, dtype=torch.float32)

    def embedding(self) -> torch.Tensor:
        return self._take(self.prefix + "embed_tokens.weight", self.shape.vocab, self.shape.hidden)

    def head(self) -> torch.Tensor:
        """The output head; of a tied model, the embedding."""
        if self.shape.tied:
            return self.embedding()
        return self._take("lm_head.weight", self.shape.vocab, self.shape.hidden)
