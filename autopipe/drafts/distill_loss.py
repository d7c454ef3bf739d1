"""The distillation loss over a trimmed vocabulary, with its gradients computed in the same pass."""

from __future__ import annotations

from typing import Any

import torch

_CHUNK_ROWS = 512
"""Rows whose logits exist at one time: they stay in the cache, and the full matrix is never stored."""


def head_loss(
    x: torch.Tensor,
    head: torch.Tensor,
    token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Sum over rows of weight * cross-entropy between the target's kept probabilities and softmax(x head^T).

    Up to a constant this is weight * KL(target || draft) (Hinton et al., arXiv 1503.02531). Logits are made, turned
    into their own gradient (softmax - target_probs) and used up chunk by chunk.

    Args:
        x: normalised hidden states, fp32 [n, hidden].
        head: output head, fp32 [vocab, hidden].
        token_ids: columns of the kept tokens, most probable first, int64 [n, k]; where a probability is 0, any.
        target_probs: their probabilities, fp32 [n, k]; a row sums to 1.
        weights: fp32 [n]; 0 leaves a row out.

    Returns:
        Scalar; backward gives the gradients of x and head.
    """
    loss: torch.Tensor = _HeadLoss.apply(x, head, token_ids, target_probs, weights)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        head: torch.Tensor,
        token_ids: torch.Tensor,
        target_probs: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        total = x.new_zeros(())
        x_grad = torch.empty_like(x)
        head_grad = torch.zeros_like(head)
        for start in range(0, x.shape[0], _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            logits = x[rows] @ head.t()  # [chunk, vocab]
            log_sum = logits.logsumexp(-1)
            expected = (logits.gather(1, token_ids[rows]) * target_probs[rows]).sum(-1)
            total += ((log_sum - expected) * weights[rows]).sum()
            gradient = logits.sub_(log_sum[:, None]).exp_()
            gradient.scatter_add_(1, token_ids[rows], -target_probs[rows]).mul_(weights[rows, None])
            torch.mm(gradient, head, out=x_grad[rows])
            head_grad.addmm_(gradient.t(), x[rows])
        ctx.save_for_backward(x_grad, head_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_grad, head_grad = ctx.saved_tensors
        return x_grad * gradients[0], head_grad * gradients[0], None, None, None
