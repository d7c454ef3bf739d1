"""How a trained policy is kept: weights in safetensors, everything else in JSON, nothing that runs code when read.

A folder with
- `policy.safetensors`: the layers of the network, `layers.N.weight` [out, in] and `layers.N.bias` [out], and the
  statistics of the features, `mean` and `std` [features];
- `policy.json`: format, spaces, feature size, activation, normalisation, algorithm, the hash of what it was trained on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError
from autopipe.envs.config import SpaceConfig

if TYPE_CHECKING:
    import torch

FORMAT = 1
WEIGHTS, HEADER = "policy.safetensors", "policy.json"


class PolicyHeader(UserModel):
    """`policy.json`.

    Attributes:
        spaces: what fixes observations and actions; another environment's must be equal.
        feature_size: length of the feature vector; nvec: of the action.
        layers: sizes of the network's layers, features first, logits last.
        normalised: whether `mean` and `std` are subtracted and divided by.
        algorithm: what trained it; timesteps: for how long.
        profile_hash: of the scenarios and randomisation it was trained on.
        notes: recipe, in words.
    """

    format: int = Field(default=FORMAT)
    spaces: SpaceConfig
    feature_size: int = Field(ge=1)
    nvec: tuple[int, ...]
    layers: tuple[int, ...] = Field(min_length=2)
    activation: Literal["tanh", "relu"] = "tanh"
    normalised: bool = True
    algorithm: str = "maskable-ppo"
    timesteps: int = Field(default=0, ge=0)
    seed: int = 0
    profile_hash: str = ""
    notes: str = ""


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """A policy as read: header and tensors by name."""

    header: PolicyHeader
    tensors: dict[str, torch.Tensor]


def save_policy(folder: Path, header: PolicyHeader, tensors: dict[str, torch.Tensor]) -> None:
    """Write a policy; the header last, so that a folder with a header is whole."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).unlink(missing_ok=True)
    save_file({name: tensor.detach().float().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    (folder / HEADER).write_text(json.dumps(header.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")


def load_policy(folder: Path, key: str = "--policy") -> SavedPolicy:
    """Read a policy and check that it is whole.

    Raises:
        ConfigError: no such folder, another format, layers or statistics that do not fit the header.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        data: Any = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(key, str(folder), f"a folder with {HEADER} and {WEIGHTS} ({error})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else data
        raise ConfigError(f"{key}: format", found, f"format {FORMAT}; export the policy anew")
    header = PolicyHeader.parse(data, prefix=f"{key} ")
    _check(header, tensors, key)
    return SavedPolicy(header, tensors)


def check_spaces(header: PolicyHeader, spaces: SpaceConfig, feature_size: int, key: str = "--policy") -> None:
    """Refuse a policy that was made for other spaces.

    Raises:
        ConfigError: spaces or features differ; the message names the first difference.
    """
    for name in SpaceConfig.model_fields:
        mine, theirs = getattr(header.spaces, name), getattr(spaces, name)
        if mine != theirs:
            raise ConfigError(f"{key}: spaces.{name}", mine, f"the environment's ({theirs}); train a policy for it")
    if header.feature_size != feature_size:
        raise ConfigError(f"{key}: feature_size", header.feature_size, f"{feature_size}; train the policy anew")


def _check(header: PolicyHeader, tensors: dict[str, torch.Tensor], key: str) -> None:
    import torch

    sizes = header.layers
    if sizes[0] != header.feature_size or sizes[-1] != sum(header.nvec):
        raise ConfigError(f"{key}: layers", sizes, f"{header.feature_size} features to {sum(header.nvec)} logits")
    wanted: dict[str, tuple[int, ...]] = {"mean": (header.feature_size,), "std": (header.feature_size,)}
    for index, (inputs, outputs) in enumerate(pairwise(sizes)):
        wanted[f"layers.{index}.weight"], wanted[f"layers.{index}.bias"] = (outputs, inputs), (outputs,)
    for name, shape in wanted.items():
        if name not in tensors:
            raise ConfigError(f"{key}: {name}", "missing", f"a tensor {list(shape)} in {WEIGHTS}")
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(f"{key}: {name}", list(tensors[name].shape), f"shape {list(shape)}")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise ConfigError(f"{key}: {name}", "NaN or infinite", "finite numbers; the file is damaged")
    if not bool((tensors["std"] > 0).all()):
        raise ConfigError(f"{key}: std", "not positive", "positive standard deviations")
