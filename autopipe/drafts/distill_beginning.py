"""A drafter that was trained before, for a training to begin with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError
from autopipe.core.models.adapters import read_adapter_config
from autopipe.core.models.shared_base import (
    INFO_FILE,
    DrafterInfo,
    adapter_folder,
    check_drafter,
    read_drafter_info,
    read_head_ids,
)

if TYPE_CHECKING:
    import torch

    from autopipe.drafts.distill_options import DistillOptions

KEY = "--from"


@dataclass(frozen=True)
class Beginning:
    """A drafter's folder, and what a training that begins with it takes over.

    Attributes:
        name: by which it is read again: a shipped one's own, else its folder.
        rank, alpha: of its LoRA.
        train_head: whether its head was trained in full.
        training: its own record of how it was trained.
    """

    name: str
    folder: Path
    info: DrafterInfo
    rank: int
    alpha: float
    train_head: bool
    training: Mapping[str, Any]

    @classmethod
    def read(cls, drafter: str) -> Beginning:
        """The drafter in a folder, or the one shipped for a model of this name.

        Raises:
            ConfigError: there is none, or none that `autopipe drafts distill` made.
        """
        named = adapter_folder(drafter)
        info, config = read_drafter_info(named, KEY), read_adapter_config(named, KEY)
        folder = Path(named).expanduser().resolve()
        training = json.loads((folder / INFO_FILE).read_text(encoding="utf-8")).get("training")
        try:
            if config.get("use_rslora") or config.get("rank_pattern") or config.get("alpha_pattern"):
                raise ValueError
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
            train_head = "lm_head" in (config.get("modules_to_save") or ())
        except (KeyError, TypeError, ValueError):
            raise ConfigError(KEY, drafter, "a drafter made by `autopipe drafts distill`") from None
        name = str(folder) if named == drafter else drafter
        return cls(name, folder, info, rank, alpha, train_head, training if isinstance(training, dict) else {})

    @property
    def shape(self) -> dict[str, Any]:
        """The options that are the drafter's own."""
        return {
            "layers": self.info.layers,
            "rank": self.rank,
            "alpha": self.alpha,
            "head": self.info.head_size,
            "train_head": self.train_head,
        }

    def adopt(self, options: DistillOptions) -> DistillOptions:
        """The options of a training that begins here."""
        return options.replace(begin_from=self.name, **self.shape)

    def require(self, options: DistillOptions, config: Any, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Its head's token ids, int64 [head]; after a check that it fits the target and the options.

        Raises:
            ConfigError: options of another drafter than this.
            ModelLoadError, UnsupportedModelError: a drafter of another target.
        """
        check_drafter(str(self.folder), config, state, KEY)
        for name, value in self.shape.items():
            if getattr(options, name) != value:
                allowed = f"{value}, that of the drafter in {KEY}"
                raise ConfigError(f"--{name.replace('_', '-')}", getattr(options, name), allowed)
        return read_head_ids(self.folder, self.info, KEY)
