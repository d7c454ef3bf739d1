"""How a shared-base drafter is trained."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError


class DistillOptions(UserModel):
    """How a drafter is trained. What is marked * must be the same when a training goes on.

    Attributes:
        layers: * layers of the target to keep.
        rank, alpha: * of LoRA; alpha None: equal to rank.
        head: * rows of the output head.
        train_head: * all rows of the head; false: LoRA on the head too.
        start: * of the head. `copy`: the target's rows; `lens`: these after a linear map fitted from the kept layers'
            output to the target's last hidden state. None: `lens` where the head is trained in full.
        optimizer: * `muon` (arXiv 2502.16982) or `adam`, for LoRA's matrices; head and norms always have Adam.
        tokens: tokens to train on in all, repeats counted.
        batch_tokens: tokens an optimizer step.
        learning_rate, head_learning_rate: peaks, of LoRA and of head and norms.
        cooldown: share of `tokens`, at the end, over which the learning rates go to 0.
        sharpness: * see `Trimmer`.
        max_length: * longest sequence.
        heldout_tokens: answer tokens of the held-out split to evaluate on.
        evaluate_every: tokens between evaluations (and checkpoints).
        kinds: * kinds of answers to train on; None: all.
        begin_from: * drafter to begin with (see `Beginning`), whose layers, rank and head these options then name.
        seed: *
    """

    layers: tuple[int, ...] = (0, 1, 2, 3)
    rank: int = Field(default=64, ge=1, le=4096)
    alpha: float | None = Field(default=None, gt=0)
    head: int = Field(default=8192, ge=16)
    train_head: bool = True
    start: Literal["copy", "lens"] | None = None
    optimizer: Literal["muon", "adam"] = "muon"
    tokens: int = Field(default=3_000_000, ge=1)
    batch_tokens: int = Field(default=1200, ge=256)
    learning_rate: float = Field(default=0.01, gt=0)
    head_learning_rate: float = Field(default=1e-3, gt=0)
    cooldown: float = Field(default=0.75, ge=0, le=1)
    sharpness: float = Field(default=1.0, gt=0)
    max_length: int = Field(default=1024, ge=8)
    heldout_tokens: int = Field(default=12_000, ge=1)
    evaluate_every: int = Field(default=100_000, ge=1)
    kinds: tuple[str, ...] | None = None
    begin_from: str | None = None
    seed: int = 0

    _MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(
        {
            "tokens",
            "batch_tokens",
            "learning_rate",
            "head_learning_rate",
            "cooldown",
            "heldout_tokens",
            "evaluate_every",
        }
    )

    @model_validator(mode="after")
    def _lens_is_trained(self) -> DistillOptions:
        if self.start == "lens" and not self.train_head:
            raise ConfigError("start", self.start, "`copy`, where the head is adapted with LoRA")
        return self

    @property
    def start_from_lens(self) -> bool:
        return self.train_head and self.start != "copy"

    def fixed(self) -> dict[str, Any]:
        """What must be the same when a training goes on."""
        return {k: v for k, v in self.model_dump(mode="json").items() if k not in self._MAY_CHANGE}


def check_options(options: DistillOptions, config: Any) -> None:
    """Check options against the target's configuration.

    Raises:
        ConfigError: layers, or rows of the head, that it does not have.
    """
    number = int(config.num_hidden_layers)
    if not options.layers or len(set(options.layers)) < len(options.layers):
        raise ConfigError("--layers", list(options.layers), "one layer or more, each once")
    if min(options.layers) < 0 or max(options.layers) >= number:
        raise ConfigError("--layers", list(options.layers), f"layers of the target, 0 to {number - 1}")
    if options.head > int(config.vocab_size):
        raise ConfigError("--head", options.head, f"16 to the target's vocabulary of {config.vocab_size}")
