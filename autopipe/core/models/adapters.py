"""PEFT adapters, read for inference: merged into the base weights or beside them; no dropout, no mutated base."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError, ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


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


@dataclass(frozen=True, slots=True)
class LowRank:
    """What LoRA adds to a module's weight: scale * up @ down (arXiv 2106.09685, eq. 3).

    Attributes:
        down: lora_A [rank, inputs].
        up: lora_B [outputs, rank].
        scale: alpha / rank, or alpha / sqrt(rank) with use_rslora (arXiv 2312.03732).
        transposed: the module keeps its weight as [inputs, outputs].
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    transposed: bool

    def added_to(self, weight: torch.Tensor) -> torch.Tensor:
        """The merged weight, computed in fp32, in the weight's dtype."""
        delta = self.up.float() @ self.down.float()
        return (weight.float() + self.scale * (delta.T if self.transposed else delta)).to(weight.dtype)


def split_lora(state: Mapping[str, torch.Tensor], folder: str) -> tuple[dict[str, torch.Tensor], dict[str, LowRank]]:
    """The base with what a LoRA adapter saved in full in its place, and by module what LoRA adds to the rest.

    Args:
        state: base weights by name; left as it is.
        folder: the adapter's folder.

    Raises:
        ConfigError: not an adapter folder.
        UnsupportedModelError: an adapter of a kind that cannot be merged here; the message says so.
        ModelLoadError: the adapter does not fit these weights.
    """
    config = read_adapter_config(folder)
    reason = unmergeable_reason(config)
    if reason is not None:
        raise UnsupportedModelError(f"adapter {folder}: {reason}")
    tensors = _read_tensors(folder)
    _check_shapes(folder, config, _shapes(tensors), _shapes(state))
    whole, added = dict(state), {}
    for name, tensor in tensors.items():
        if name.endswith(_DOWN):
            module = name.removeprefix(_PREFIX).removesuffix(_DOWN)
            up = tensors[name.replace(".lora_A.", ".lora_B.")]
            added[module] = LowRank(tensor, up, _scale(config, module), bool(config.get("fan_in_fan_out")))
        elif not name.endswith(_UP):
            base_name = name.removeprefix(_PREFIX)
            whole[base_name] = tensor.to(whole[base_name].dtype)
    return whole, added


def merge_lora(state: Mapping[str, torch.Tensor], folder: str) -> dict[str, torch.Tensor]:
    """A state dict with a LoRA adapter merged. Arguments and errors as of `split_lora`."""
    merged, added = split_lora(state, folder)
    for module, low_rank in added.items():
        merged[f"{module}.weight"] = low_rank.added_to(merged[f"{module}.weight"])
    return merged


def check_lora(folder: str, state: Mapping[str, torch.Tensor]) -> None:
    """Check that `split_lora` could read an adapter of these weights, reading no more than its header.

    Raises:
        ConfigError, UnsupportedModelError, ModelLoadError: as `split_lora`.
    """
    from safetensors import SafetensorError, safe_open

    config = read_adapter_config(folder)
    reason = unmergeable_reason(config)
    if reason is not None:
        raise UnsupportedModelError(f"adapter {folder}: {reason}")
    try:
        with safe_open(_tensor_file(folder), framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict: it cannot be iterated
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"adapter {folder}: its tensors cannot be read: {error}") from None
    _check_shapes(folder, config, shapes, _shapes(state))


def _check_shapes(
    folder: str,
    config: dict[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    base: Mapping[str, tuple[int, ...]],
) -> None:
    """Every tensor of an adapter has its place in the base, and all that belong to one module fit each other."""
    for name, shape in tensors.items():
        module = name.removeprefix(_PREFIX).removesuffix(_DOWN).removesuffix(_UP)
        if not name.endswith((_DOWN, _UP)):
            if base.get(module) != shape:
                raise ModelLoadError(
                    f"adapter {folder}: its tensor {name} is {shape}, the base model's {base.get(module, 'missing')}"
                )
            continue
        down, up = (tensors.get(f"{_PREFIX}{module}{suffix}") for suffix in (_DOWN, _UP))
        weight = base.get(f"{module}.weight")
        if weight is None or down is None or up is None:
            missing = "in the base model's weights" if weight is None else "complete"
            raise ModelLoadError(f"adapter {folder}: its module {module} is not {missing}")
        rank = _rank(config, module)
        if down[0] != rank or up[-1] != rank:
            raise ModelLoadError(
                f"adapter {folder}: module {module} has ranks {down[0]} and {up[-1]}; its config says {rank}"
            )
        delta = (down[1], up[0]) if config.get("fan_in_fan_out") else (up[0], down[1])
        if delta != weight:
            raise ModelLoadError(f"adapter {folder}: module {module} is {delta}, the base model's {weight}")


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _tensor_file(folder: str) -> Path:
    return Path(folder).expanduser() / "adapter_model.safetensors"


def _read_tensors(folder: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(_tensor_file(folder))
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"adapter {folder}: its tensors cannot be read: {error}") from None


def _rank(config: dict[str, Any], module: str) -> int:
    return int(_by_pattern(config.get("rank_pattern"), module, config["r"]))


def _scale(config: dict[str, Any], module: str) -> float:
    rank = _rank(config, module)
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's rule: a pattern is the end of a module's name, or a regular expression for it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
