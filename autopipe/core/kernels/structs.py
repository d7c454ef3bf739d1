"""The C structs of kernels/model.h, and in Python what they are filled from."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

from autopipe.core.kernels.formats import WeightFormat


class AdapterStruct(Structure):
    _fields_ = [
        ("down", c_void_p), ("up", c_void_p), ("first", c_void_p), ("rank", c_int32), ("width", c_int32),
    ]  # fmt: skip


class LayerWeightsStruct(Structure):
    _fields_ = [
        ("qkv", c_void_p), ("output", c_void_p), ("gate_up", c_void_p), ("down", c_void_p),
        ("input_norm", c_void_p), ("mlp_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("qkv_adapter", AdapterStruct), ("output_adapter", AdapterStruct), ("gate_up_adapter", AdapterStruct),
        ("down_adapter", AdapterStruct),
    ]  # fmt: skip


class ModelDescriptionStruct(Structure):
    _fields_ = [
        ("isa", c_int32), ("format", c_int32), ("num_layers", c_int32), ("hidden", c_int32), ("intermediate", c_int32),
        ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32), ("vocab", c_int32),
        ("page_tokens", c_int32), ("norm_epsilon", c_float), ("attention_scale", c_float),
        ("layers", POINTER(LayerWeightsStruct)), ("final_norm", c_void_p), ("head", c_void_p), ("embedding", c_void_p),
        ("screen", c_void_p), ("screen_norms", c_void_p),
    ]  # fmt: skip


class BestStruct(Structure):
    _fields_ = [("logit", c_float), ("id", c_int32)]


class SegmentStruct(Structure):
    _fields_ = [("rows", c_int64), ("position", c_int64), ("pages", POINTER(c_void_p))]


class PassStruct(Structure):
    _fields_ = [
        ("ids", POINTER(c_int64)), ("segments", POINTER(SegmentStruct)), ("num_segments", c_int64),
        ("rope_cos", c_void_p), ("rope_sin", c_void_p),
        ("logit_rows", POINTER(c_int64)), ("num_logits", c_int64), ("logits", c_void_p), ("best", POINTER(BestStruct)),
    ]  # fmt: skip


class MatmulJob(Structure):
    _fields_ = [
        ("format", c_int32), ("rows", c_int32), ("inputs", c_int32), ("outputs", c_int32), ("bf16_rows", c_int32),
        ("x", c_void_p), ("weights", c_void_p), ("bias", c_void_p), ("out", c_void_p), ("converted", c_void_p),
    ]  # fmt: skip


@dataclass(frozen=True)
class AdapterAddresses:
    """Addresses of what LoRA adds to a product, and its sizes; down 0: nothing. See Adapter in model.h."""

    down: int = 0
    up: int = 0
    first: int = 0
    rank: int = 0
    width: int = 0


@dataclass(frozen=True)
class LayerAddresses:
    """Addresses of one layer's packed weights; 0: absent. See LayerWeights in model.h."""

    qkv: int
    output: int
    gate_up: int
    down: int
    input_norm: int
    mlp_norm: int
    q_norm: int
    k_norm: int
    qkv_bias: int
    qkv_adapter: AdapterAddresses = AdapterAddresses()
    output_adapter: AdapterAddresses = AdapterAddresses()
    gate_up_adapter: AdapterAddresses = AdapterAddresses()
    down_adapter: AdapterAddresses = AdapterAddresses()


@dataclass(frozen=True)
class ModelAddresses:
    """Addresses of a model's packed weights; embedding 0: read from `head` (tied); screen 0: none."""

    layers: tuple[LayerAddresses, ...]
    final_norm: int
    head: int
    embedding: int
    screen: int = 0
    screen_norms: int = 0


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder of the Llama family; see ModelDescription in model.h."""

    format: WeightFormat
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    page_tokens: int
    norm_epsilon: float
    attention_scale: float
