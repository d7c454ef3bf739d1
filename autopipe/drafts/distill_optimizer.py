"""Muon or Adam for LoRA's matrices, Adam for head and norms; state that can be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from autopipe.drafts.distill_checkpoint import optimizer_tensors, restore_optimizer
from autopipe.drafts.distill_student import Student

_BETAS = (0.9, 0.95)
_MOMENTUM = 0.95


class Optimizer:
    """Two optimizers stepped together.

    Muon orthogonalises the momentum of a matrix before it is applied (Jordan 2024; scaled to Adam's size of step as
    in arXiv 2502.16982): LoRA's thin matrices make that cheap.
    """

    def __init__(self, student: Student, kind: Literal["muon", "adam"]) -> None:
        self._names = {id(parameter): name for name, parameter in student.named_parameters()}
        parameters = student.parameters()
        matrices = [*parameters.down, *parameters.up]
        self._matrices: torch.optim.Optimizer
        if kind == "muon":
            self._matrices = torch.optim.Muon(
                matrices, weight_decay=0.0, momentum=_MOMENTUM, adjust_lr_fn="match_rms_adamw"
            )
        else:
            self._matrices = torch.optim.AdamW(matrices, betas=_BETAS, weight_decay=0.0, fused=True)
        self._rest = torch.optim.AdamW(
            [*parameters.head, *parameters.norms], betas=_BETAS, weight_decay=0.0, fused=True
        )

    def step(self, learning_rate: float, head_learning_rate: float) -> None:
        """One step from the gradients there are; clears them."""
        for optimizer, rate in ((self._matrices, learning_rate), (self._rest, head_learning_rate)):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        return optimizer_tensors(self._matrices, self._names) | optimizer_tensors(self._rest, self._names)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for optimizer in (self._matrices, self._rest):
            restore_optimizer(optimizer, self._names, tensors, ("step", "exp_avg", "exp_avg_sq", "momentum_buffer"))


def schedule(trained: int, tokens: int, cooldown: float, step: int, warmup_steps: int = 15) -> float:
    """Factor of the learning rates: a short linear rise, constant, then linear to (nearly) 0 over the last share.

    Constant until the end is decided on, so a training may be prolonged (warm-up, stable, decay; arXiv 2404.06395).
    """
    rise = min(1.0, (step + 1) / warmup_steps)
    left = 1.0 - trained / tokens
    return rise * (min(1.0, max(left, 0.01) / cooldown) if cooldown else 1.0)
