"""The most probable tokens of rows of logits, and a choice among them."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import torch

from autopipe.drafts.store import TOP

_BLOCK = 64


def top_logprobs(logits: torch.Tensor, num: int = TOP) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The `num` most probable tokens of each row, best first, and their log probabilities at temperature 1.

    At least `num` logits reach the num-th best maximum of blocks of 64, so only those that do are sorted: 0.13 ms a
    row with the normalisation, against 0.31 ms for torch's `topk` and `logsumexp` (49,152 logits, one thread). Of
    equal logits the smallest id comes first, as in greedy decoding.

    Args:
        logits: float32 [rows, vocab].

    Returns:
        ids int64 [rows, num] and log probabilities float32 [rows, num]; fewer columns in a smaller vocabulary.
    """
    rows, vocab = logits.shape
    num = min(num, vocab)
    whole = vocab // _BLOCK * _BLOCK
    best = logits
    if whole // _BLOCK >= num:
        best = logits[:, :whole].reshape(rows, -1, _BLOCK).amax(dim=2)  # [rows, blocks]
    thresholds = np.partition(best.numpy(), -num, axis=1)[:, -num]
    values = logits.numpy()
    token_ids = np.empty((rows, num), dtype=np.int64)
    logprobs = np.empty((rows, num), dtype=np.float32)
    for row, normaliser in enumerate(_log_sums(logits)):
        candidates = np.flatnonzero(values[row] >= thresholds[row])
        chosen = candidates[np.argsort(-values[row, candidates], kind="stable")[:num]]
        token_ids[row], logprobs[row] = chosen, values[row, chosen] - normaliser
    return token_ids, logprobs


def _log_sums(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    """log sum exp of each row [rows]."""
    largest = logits.amax(dim=1, keepdim=True)
    sums: npt.NDArray[np.float32] = ((logits - largest).exp_().sum(dim=1).log_() + largest[:, 0]).numpy()
    return sums


def sample(
    token_ids: npt.NDArray[np.int64],
    logprobs: npt.NDArray[np.float32],
    temperature: float,
    top_p: float,
    chooser: random.Random,
) -> int:
    """One token of a row: the first at temperature 0, else drawn from the smallest set that holds `top_p`.

    Tokens beyond those given are never drawn.
    """
    if temperature == 0:
        return int(token_ids[0])
    weights = np.exp((logprobs - logprobs[0]) / temperature)
    sums = np.cumsum(weights)
    kept = int(np.searchsorted(sums, top_p * sums[-1])) + 1
    drawn = chooser.random() * sums[min(kept, len(sums)) - 1]
    return int(token_ids[int(np.searchsorted(sums, drawn, side="right"))])
