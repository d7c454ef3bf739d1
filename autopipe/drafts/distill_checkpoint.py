"""Checkpoints of a training: a folder that appears whole, so that a run may be killed at any moment."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from autopipe.core.errors import ConfigError

_PREFIX = "step-"
_KEPT = 2


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Write `folder`/step-N (training.safetensors, state.json) and remove all but the newest two.

    Args:
        tensors: parameters and the optimizer's, by name.
        state: everything else, as JSON.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    final, temporary = folder / f"{_PREFIX}{step:08d}", folder / ".writing"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary / "training.safetensors"
    )
    (temporary / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    for file in temporary.iterdir():
        _flush(file)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in _steps(folder)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Tensors and state of the newest checkpoint; None where there is none.

    Raises:
        ConfigError: it is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    steps = _steps(folder)
    if not steps:
        return None
    try:
        state = json.loads((steps[-1] / "state.json").read_text(encoding="utf-8"))
        return load_file(steps[-1] / "training.safetensors"), state
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError("--out", str(steps[-1]), f"an undamaged checkpoint ({error}); delete it to go back") from None


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], prefix: str = "optimizer."
) -> dict[str, torch.Tensor]:
    """An optimizer's state as tensors by name.

    Args:
        names: name of every parameter by its `id`.
    """
    return {
        f"{prefix}{names[id(parameter)]}.{key}": value if torch.is_tensor(value) else torch.tensor(value)
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    tensors: Mapping[str, torch.Tensor],
    keys: Iterable[str],
    prefix: str = "optimizer.",
) -> None:
    """The reverse of `optimizer_tensors`, for state entries called `keys`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = {key: tensors.get(f"{prefix}{names[id(parameter)]}.{key}") for key in keys}
            present = {key: tensor for key, tensor in found.items() if tensor is not None}
            if present:
                optimizer.state[parameter] = present


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_PREFIX}*"))


def _flush(file: Path) -> None:
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())
