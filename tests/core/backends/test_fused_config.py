"""Which models fit the fused backend, and why others do not."""

from __future__ import annotations

import pytest

from autopipe.core.backends.fused import FusedBackend
from autopipe.core.backends.fused_config import inverse_frequencies, shape_of
from tests.tiny import tiny_config


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_family_fits(kind):
    assert FusedBackend.reason_unfit(tiny_config(kind)) is None


@pytest.mark.parametrize(
    ("kind", "overrides", "reason"),
    [
        ("gpt2", {}, "gpt2"),
        ("mamba", {}, "mamba"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"attention_bias": True}, "bias"),
        ("llama", {"mlp_bias": True}, "bias"),
        ("qwen3", {"attention_bias": True}, "bias"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            "yarn",
        ),
        ("mistral_sliding", {}, "sliding window of 16"),
    ],
)
def test_reason_names_what_does_not_fit(kind, overrides, reason):
    assert reason in FusedBackend.reason_unfit(tiny_config(kind, **overrides))


def test_window_fits_when_the_context_stays_within_it():
    config = tiny_config("mistral_sliding")
    assert FusedBackend.reason_unfit(config, max_length=16) is None
    assert FusedBackend.reason_unfit(config, max_length=17) is not None


def test_dequantised_gguf_fits():
    config = tiny_config(quantization_config={"quant_method": "gguf"})
    assert FusedBackend.reason_unfit(config) is None


def test_linear_scaling_divides_all_frequencies():
    plain = inverse_frequencies({"rope_theta": 1e4}, 8)
    scaled = inverse_frequencies({"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}, 8)
    assert (scaled * 2).tolist() == plain.tolist()


def test_shape_reads_sizes():
    shape = shape_of(tiny_config("qwen3"))
    assert (shape.head_dim, shape.num_kv_heads, shape.qk_norm, shape.qkv_bias) == (32, 2, True, False)
