"""Checkpoints of a training run: parameters and the optimiser's state in safetensors, the rest in JSON; no pickle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from autopipe.policies.rl_train import TrainConfig

_TENSORS, _FACTS = "checkpoint.safetensors", "checkpoint.json"


def save_checkpoint(folder: Path, model: Any, config: TrainConfig, timesteps: int) -> None:
    """Write a checkpoint; one that is being written never replaces a whole one."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {
        f"policy.{name}": tensor.detach().contiguous().clone() for name, tensor in model.policy.state_dict().items()
    }
    for index, state in model.policy.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"optimizer.{index}.{name}"] = value.detach().reshape(value.shape).contiguous().clone()
    facts = {"timesteps": timesteps, "config": config.model_dump(mode="json")}
    save_file(tensors, folder / (_TENSORS + ".new"))
    (folder / (_FACTS + ".new")).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    os.replace(folder / (_TENSORS + ".new"), folder / _TENSORS)
    os.replace(folder / (_FACTS + ".new"), folder / _FACTS)


def read_config(folder: Path) -> tuple[TrainConfig, int]:
    """Settings and timesteps of the run in a folder.

    Raises:
        ConfigError: no checkpoint there.
    """
    from autopipe.policies.rl_train import TrainConfig

    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        return TrainConfig.parse(facts["config"]), int(facts["timesteps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("--resume", str(folder), f"a folder with a checkpoint ({error})") from None


def load_checkpoint(folder: Path, model: Any, config: TrainConfig) -> int:
    """Put a checkpoint into `model`; return its timesteps.

    Raises:
        ConfigError: no checkpoint, or one of a run with other settings.
    """
    from safetensors.torch import load_file

    saved, timesteps = read_config(folder)
    for name in type(config).model_fields:
        mine, theirs = getattr(config, name), getattr(saved, name)
        if name not in ("timesteps", "eval_every", "envs") and mine != theirs:
            raise ConfigError(f"--resume: {name}", mine, f"as the run in {folder} has it ({theirs})")
    tensors = load_file(folder / _TENSORS)
    model.policy.load_state_dict(
        {name.removeprefix("policy."): value for name, value in tensors.items() if name.startswith("policy.")}
    )
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = value
    if state:
        optimizer = model.policy.optimizer
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return timesteps
