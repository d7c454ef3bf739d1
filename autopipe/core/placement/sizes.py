"""Sizes of decoder models, from config.json or from a table of published shapes. Reads no weights, imports no torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.core.errors import ConfigError, ModelLoadError


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What memory and time of a decoder with gated MLPs (Llama, Mistral, Qwen2, Qwen3 and alike) depend on.

    Attributes:
        tied: embedding and output head are one matrix.
        qkv_bias: q, k and v projections have a bias.
        max_length: longest sequence in tokens; None: not said.
    """

    name: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    max_length: int | None = None

    @property
    def matrix_parameters_per_layer(self) -> int:
        """Weights of one layer's matrices: those that are quantised, and read by every forward."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden * (2 * queries + 2 * keys) + 3 * self.hidden * self.intermediate

    @property
    def vector_parameters_per_layer(self) -> int:
        """Norms and biases of one layer."""
        bias = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        return 2 * self.hidden + bias

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def num_parameters(self) -> int:
        per_layer = self.matrix_parameters_per_layer + self.vector_parameters_per_layer
        matrices = 1 if self.tied else 2
        return self.num_layers * per_layer + matrices * self.embedding_parameters + self.hidden

    @property
    def kv_numbers_per_token_and_layer(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


def _row(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int, tied: bool,
    qkv_bias: bool = False, max_length: int = 131_072,
) -> dict[str, Any]:  # fmt: skip
    return {
        "hidden": hidden, "intermediate": intermediate, "num_layers": layers, "num_heads": heads,
        "num_kv_heads": kv_heads, "head_dim": head_dim, "vocab": vocab, "tied": tied, "qkv_bias": qkv_bias,
        "max_length": max_length,
    }  # fmt: skip


# config.json of the repositories on the hub: meta-llama/Llama-*, Qwen/Qwen2.5-*, Qwen/Qwen3-*,
# mistralai/Mistral-7B-v0.3, HuggingFaceTB/SmolLM2-*. Llama 3.1: also arXiv 2407.21783, table 3; Qwen2.5: also
# arXiv 2412.15115, table 1.
PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm2-135m": _row(576, 1536, 30, 9, 3, 64, 49_152, True, max_length=8_192),
    "smollm2-360m": _row(960, 2560, 32, 15, 5, 64, 49_152, True, max_length=8_192),
    "smollm2-1.7b": _row(2048, 8192, 24, 32, 32, 64, 49_152, True, max_length=8_192),
    "llama-3.2-1b": _row(2048, 8192, 16, 32, 8, 64, 128_256, True),
    "llama-3.2-3b": _row(3072, 8192, 28, 24, 8, 128, 128_256, True),
    "llama-3.1-8b": _row(4096, 14_336, 32, 32, 8, 128, 128_256, False),
    "llama-3.1-70b": _row(8192, 28_672, 80, 64, 8, 128, 128_256, False),
    "llama-3.3-70b": _row(8192, 28_672, 80, 64, 8, 128, 128_256, False),
    "llama-3.1-405b": _row(16_384, 53_248, 126, 128, 8, 128, 128_256, False),
    "llama-2-7b": _row(4096, 11_008, 32, 32, 32, 128, 32_000, False, max_length=4_096),
    "llama-2-13b": _row(5120, 13_824, 40, 40, 40, 128, 32_000, False, max_length=4_096),
    "llama-2-70b": _row(8192, 28_672, 80, 64, 8, 128, 32_000, False, max_length=4_096),
    "mistral-7b-v0.3": _row(4096, 14_336, 32, 32, 8, 128, 32_768, False, max_length=32_768),
    "qwen2.5-0.5b": _row(896, 4864, 24, 14, 2, 64, 151_936, True, True, 32_768),
    "qwen2.5-1.5b": _row(1536, 8960, 28, 12, 2, 128, 151_936, True, True, 32_768),
    "qwen2.5-3b": _row(2048, 11_008, 36, 16, 2, 128, 151_936, True, True, 32_768),
    "qwen2.5-7b": _row(3584, 18_944, 28, 28, 4, 128, 152_064, False, True, 32_768),
    "qwen2.5-14b": _row(5120, 13_824, 48, 40, 8, 128, 152_064, False, True, 32_768),
    "qwen2.5-32b": _row(5120, 27_648, 64, 40, 8, 128, 152_064, False, True, 32_768),
    "qwen2.5-72b": _row(8192, 29_568, 80, 64, 8, 128, 152_064, False, True, 32_768),
    "qwen3-0.6b": _row(1024, 3072, 28, 16, 8, 128, 151_936, True, max_length=40_960),
    "qwen3-1.7b": _row(2048, 6144, 28, 16, 8, 128, 151_936, True, max_length=40_960),
    "qwen3-4b": _row(2560, 9728, 36, 32, 8, 128, 151_936, True, max_length=40_960),
    "qwen3-8b": _row(4096, 12_288, 36, 32, 8, 128, 151_936, False, max_length=40_960),
    "qwen3-14b": _row(5120, 17_408, 40, 40, 8, 128, 151_936, False, max_length=40_960),
    "qwen3-32b": _row(5120, 25_600, 64, 64, 8, 128, 151_936, False, max_length=40_960),
}

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_SUFFIX = re.compile(r"-(instruct|chat|hf|base|it|\d{4})$")


def sizes_of(model: str, key: str = "model") -> ModelSizes:
    """Sizes of a model, without its weights.

    Args:
        model: a folder with config.json, or a name: of the table, or a hub id that means one in it
            (`meta-llama/Llama-3.1-8B-Instruct`).
        key: the user's key, for error messages.

    Raises:
        ConfigError: neither; the message lists the table.
        ModelLoadError: a config.json that cannot be read, or of another kind of model.
    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return sizes_from_config(_read(folder / "config.json"), folder.name)
    name = published_name(model)
    if name in PUBLISHED:
        return ModelSizes(name=name, **PUBLISHED[name])
    raise ConfigError(key, model, f"a folder with config.json, or one of: {', '.join(PUBLISHED)}")


def published_name(model: str) -> str:
    """The table's name for what a user may call a model: no owner, no `-Instruct`, lower case."""
    name = model.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    while (shorter := _SUFFIX.sub("", name)) != name:
        name = shorter
    return name


def sizes_from_config(config: dict[str, Any], name: str) -> ModelSizes:
    """Sizes from the contents of a transformers config.json.

    Raises:
        ModelLoadError: another kind of model, or a key is missing.
    """
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise ModelLoadError(f"{name}: memory and time can be planned for {', '.join(_FAMILIES)}; this is a {kind!r}")
    try:
        heads = int(config["num_attention_heads"])
        return ModelSizes(
            name=name,
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            max_length=config.get("max_position_embeddings"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{name}: config.json lacks or has a bad value for {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return data
