"""Log-probabilities of the model's own distribution: log_softmax of the raw logits, before any processing.

Computed row by row with the same operations on the same bits: plain and speculative decoding report the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopipe.core.noise import Float32Array


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, float32) at one position.

    Attributes:
        token_id: the chosen token.
        logprob: of the chosen token.
        top: (token id, log-probability) of the likeliest tokens, likeliest first, lower ids first among equals.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(row: Float32Array, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities at one position.

    Args:
        row: raw logits [vocab].
        token_id: the chosen token.
        num_top: how many of the likeliest tokens to list; 0 for none.
    """
    row = np.array(row, dtype=np.float32)  # own memory: the same alignment, so the same summation, every time
    shifted = row - row.max()
    log_total = np.log(np.exp(shifted).sum(dtype=np.float64))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        count = min(num_top, len(row))
        smallest = np.partition(shifted, len(row) - count)[len(row) - count]
        ids = np.flatnonzero(shifted >= smallest)
        ids = ids[np.argsort(-shifted[ids], kind="stable")][:count]
        top = tuple((int(index), float(np.float32(shifted[index] - log_total))) for index in ids)
    return TokenLogprobs(token_id, float(np.float32(shifted[token_id] - log_total)), top)
