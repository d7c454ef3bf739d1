"""Which models the `fused` backend can run, and their sizes, read from a transformers config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class DecoderShape:
    """A decoder of the Llama family.

    Attributes:
        qkv_bias: q, k and v projections have a bias (Qwen2).
        qk_norm: q and k are RMS-normalised per head before rotation (Qwen3).
        inverse_frequencies: of the rotary embedding, [head_dim / 2], scaling applied.
    """

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_epsilon: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    inverse_frequencies: torch.Tensor

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def kv_numbers_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def rope_tables(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions 0 ... positions-1, fp32 [positions, head_dim / 2] each."""
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self.inverse_frequencies)
        return angles.cos().contiguous(), angles.sin().contiguous()


def reason_unfit(config: Any, max_length: int | None = None) -> str | None:
    """Why the model of a transformers config cannot run here, in words; None when it can.

    Args:
        max_length: longest sequence asked for; matters to models with a sliding window.
    """
    kind = getattr(config, "model_type", None)
    if kind not in MODEL_TYPES:
        return f"model type {kind!r} is not one of {', '.join(MODEL_TYPES)}"
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        method = (
            quantisation.get("quant_method")
            if isinstance(quantisation, dict)
            else getattr(quantisation, "quant_method", "unknown")
        )
        # A GGUF file's numbers are dequantised when transformers loads it; only the note stays in the config.
        if str(getattr(method, "value", method)) != "gguf":
            return f"quantised weights ({method})"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    if kind != "qwen2" and getattr(config, "attention_bias", False):
        return "biases in the attention's projections"
    if getattr(config, "mlp_bias", False):
        return "biases in the MLP"
    if _head_dim(config) % 2:
        return f"odd head size {_head_dim(config)}"
    if config.num_attention_heads % _kv_heads(config):
        return f"{config.num_attention_heads} heads do not divide among {_kv_heads(config)} KV heads"
    return _window_reason(config, max_length) or _rope_reason(config)


def _window_reason(config: Any, max_length: int | None) -> str | None:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    slides = "sliding_attention" in layer_types if layer_types else config.model_type == "mistral"
    if window is None or not slides or getattr(config, "use_sliding_window", True) is False:
        return None
    if max_length is not None and max_length <= window:
        return None
    return f"sliding window of {window} tokens (runs here with max_length of at most {window})"


def _rope_reason(config: Any) -> str | None:
    parameters = _rope_parameters(config)
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        return f"rotary scaling {kind!r} is not one of {', '.join(ROPE_TYPES)}"
    if float(parameters.get("partial_rotary_factor", 1.0) or 1.0) != 1.0:
        return "partly rotated heads"
    return None


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _rope_parameters(config: Any) -> dict[str, Any]:
    """transformers 5 calls it rope_parameters (theta inside); before, rope_theta and rope_scaling."""
    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = getattr(config, "rope_theta", None) or 10000.0
    if getattr(config, "partial_rotary_factor", None) is not None:
        parameters.setdefault("partial_rotary_factor", config.partial_rotary_factor)
    return parameters


def shape_of(config: Any) -> DecoderShape:
    """Sizes of a model for which `reason_unfit` is None."""
    return DecoderShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=_kv_heads(config),
        head_dim=_head_dim(config),
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_epsilon=float(config.rms_norm_eps),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type == "qwen3",
        inverse_frequencies=inverse_frequencies(_rope_parameters(config), _head_dim(config)),
    )


def inverse_frequencies(parameters: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, fp32 [head_dim / 2].

    theta^(-2i/head_dim) (RoFormer, arXiv 2104.09864). `linear` divides all by the factor (arXiv 2306.15595); `llama3`
    divides the long waves, keeps the short ones, and blends in between (Llama 3.1).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (float(parameters["rope_theta"]) ** exponents)
    kind = parameters.get("rope_type", "default")
    if kind == "linear":
        return frequencies / float(parameters["factor"])
    if kind != "llama3":
        return frequencies
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original = float(parameters["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    share_kept = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share_kept) * frequencies / factor + share_kept * frequencies
