"""PEFT adapters, merged into the base weights for inference: no extra matmuls, no dropout, no mutated base."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError, ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."


def read_adapter_config(folder: str, key: str = "adapter") -> dict[str, Any]:
    """The adapter's own config.

    Raises:
        ConfigError: not a folder with adapter_config.json and adapter_model.safetensors.
    """
    path = Path(folder).expanduser()
    allowed = "a folder with adapter_config.json and adapter_model.safetensors"
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (path / file).is_file():
            raise ConfigError(key, folder, f"{allowed}; there is no {file}")
    try:
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(key, folder, f"{allowed}; its config is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(key, folder, f"{allowed}; its config is not a JSON object")
    return config


def unmergeable_reason(config: dict[str, Any]) -> str | None:
    """Why `merge_lora` cannot merge an adapter with this config; None if it can."""
    if config.get("peft_type") != "LORA":
        return f"adapters of type {config.get('peft_type')} need the transformers backend"
    for option in ("use_dora", "lora_bias", "use_qalora", "megatron_config", "trainable_token_indices"):
        if config.get(option):
            return f"LoRA with {option} needs the transformers backend"
    if config.get("bias", "none") != "none":
        return "LoRA that trains biases needs the transformers backend"
    return None


def merge_lora(state: dict[str, torch.Tensor], folder: str) -> dict[str, torch.Tensor]:
    """A state dict with a LoRA adapter merged: W + scale * B A (arXiv 2106.09685, eq. 3), computed in fp32.

    scale is alpha / r, or alpha / sqrt(r) with use_rslora (arXiv 2312.03732). Modules the adapter saved in full
    replace those of the base.

    Args:
        state: base weights by name; left as it is.
        folder: the adapter's folder.

    Raises:
        ConfigError: not an adapter folder.
        UnsupportedModelError: an adapter of a kind that cannot be merged here; the message says so.
        ModelLoadError: the adapter does not fit these weights.
    """
    from safetensors.torch import load_file

    config = read_adapter_config(folder)
    reason = unmergeable_reason(config)
    if reason is not None:
        raise UnsupportedModelError(f"adapter {folder}: {reason}")
    tensors = load_file(Path(folder).expanduser() / "adapter_model.safetensors")
    merged = dict(state)
    used = set()
    for name, down in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        up_name = name.replace(".lora_A.", ".lora_B.")
        weight_name = f"{module}.weight"
        if weight_name not in merged or up_name not in tensors:
            raise ModelLoadError(f"adapter {folder}: its module {module} is not in the base model's weights")
        base = merged[weight_name]
        delta = tensors[up_name].float() @ down.float()  # [outputs, inputs]
        if config.get("fan_in_fan_out"):
            delta = delta.T
        if delta.shape != base.shape:
            raise ModelLoadError(
                f"adapter {folder}: module {module} is {tuple(delta.shape)}, the base model's {tuple(base.shape)}"
            )
        merged[weight_name] = (base.float() + _scale(config, module) * delta).to(base.dtype)
        used |= {name, up_name}
    for name in tensors.keys() - used:
        base_name = name.removeprefix(_PREFIX)
        if base_name not in merged or merged[base_name].shape != tensors[name].shape:
            raise ModelLoadError(f"adapter {folder}: its tensor {name} does not fit the base model's weights")
        merged[base_name] = tensors[name].to(merged[base_name].dtype)
    return merged


def _scale(config: dict[str, Any], module: str) -> float:
    rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's rule: a pattern is the end of a module's name, or a regular expression for it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
