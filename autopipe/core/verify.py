"""Which drafts a stage keeps: two rules, both pure.

Words, for one verification of n drafts that follow one prefix:

* draft token: proposed by the stage upstream for one position, on the condition that all drafts before it hold.
* accepted token: a draft that the verifier keeps. Accepted drafts are always the first ones of the block.
* recovered token: the verifier's own token at the position of the first draft it does not keep; later drafts are void.
* bonus token: the verifier's own token after the last draft, when it keeps them all. With n = 0 this is plain decoding.

A verification therefore gives `num_accepted` accepted tokens and exactly one recovered or bonus token.

The rules:

* equality: the verifier picks its own token at each position and keeps a draft that equals it. The output is the
  verifier's own, token for token.
* rejection (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, algorithm 1; Chen et
  al., "Accelerating large language model decoding with speculative sampling", 2023, algorithm 2): a draft x is kept
  with probability min(1, target(x) / draft(x)); the recovered token comes from max(target - draft, 0), normalised;
  the bonus token from the target's distribution. The output is distributed as the verifier's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autopipe.core.errors import AutoPipeError
from autopipe.core.noise import Purpose


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A distribution over some token ids; all others have probability 0.

    Attributes:
        ids: integers [k], ascending.
        probs: float32 [k], >= 0; read as normalised by their own sum, whatever its rounding.
    """

    ids: npt.NDArray[np.integer[Any]]
    probs: npt.NDArray[np.float32]

    @classmethod
    def one_hot(cls, token_id: int) -> SparseRow:
        """All probability on one token: a greedy or n-gram draft."""
        return cls(np.array([token_id], dtype=np.int64), np.ones(1, dtype=np.float32))

    def prob(self, token_id: int) -> float:
        """Probability of one token, float64."""
        index = int(np.searchsorted(self.ids, token_id))
        if index == len(self.ids) or self.ids[index] != token_id:
            return 0.0
        return float(self.probs[index]) / float(self.probs.sum(dtype=np.float64))

    def truncated(self, size: int) -> SparseRow:
        """The `size` likeliest tokens (ties to the lower id), renormalised."""
        if len(self.ids) <= size:
            return self
        kept = np.sort(np.argsort(-self.probs, kind="stable")[:size])
        probs = self.probs[kept]
        return SparseRow(self.ids[kept], probs / probs.sum())

    def draw(self, u: float) -> int:
        """The token at quantile u in [0, 1), in the order of ids."""
        return _draw(self.ids, self.probs, u)


def verify_by_equality(
    drafts: Sequence[int], pick: Callable[[int], int], ends: Container[int] = ()
) -> tuple[int, list[int]]:
    """Keep drafts while they equal the verifier's own picks.

    Args:
        drafts: n drafted token ids.
        pick: gives the verifier's token after the first j drafts; called for j = 0, 1, ... up to the first mismatch.
        ends: tokens that end the text: after an accepted one nothing is picked any more.

    Returns:
        num_accepted, and the accepted tokens with the recovered or bonus token (none after an end) after them.
    """
    token_ids: list[int] = []
    for index, draft in enumerate(drafts):
        token_ids.append(pick(index))
        if token_ids[-1] != draft:
            return index, token_ids
        if draft in ends:
            return index + 1, token_ids
    return len(drafts), [*token_ids, pick(len(drafts))]


def verify_by_rejection(
    drafts: Sequence[int],
    draft_rows: Sequence[SparseRow],
    target_row: Callable[[int], SparseRow],
    uniform: Callable[[int, Purpose], float],
    ends: Container[int] = (),
) -> tuple[int, list[int]]:
    """Keep drafts by rejection sampling.

    Args:
        drafts: n drafted token ids, each drawn from its row.
        draft_rows: n processed distributions of the drafter.
        target_row: gives the verifier's distribution after the first j drafts; called for j = 0, 1, ... up to the
            first draft not kept.
        uniform: the random number in [0, 1) of draft j for a purpose; all independent.
        ends: tokens that end the text: after an accepted one nothing is drawn any more.

    Returns:
        num_accepted, and the accepted tokens with the recovered or bonus token (none after an end) after them.

    Raises:
        AutoPipeError: a draft has probability 0 in its own row, so it cannot have been drawn from it.
    """
    for index, (draft, draft_row) in enumerate(zip(drafts, draft_rows, strict=True)):
        target_probs, draft_prob = target_row(index), draft_row.prob(draft)
        if draft_prob <= 0:
            raise AutoPipeError(f"draft token {draft} is not in the distribution that came with it")
        if uniform(index, Purpose.ACCEPT) * draft_prob >= target_probs.prob(draft):
            recovered = draw_recovered(target_probs, draft_row, uniform(index, Purpose.RECOVER))
            return index, [*drafts[:index], recovered]
        if draft in ends:
            return index + 1, list(drafts[: index + 1])
    bonus = target_row(len(drafts)).draw(uniform(len(drafts), Purpose.DRAW))
    return len(drafts), [*drafts, bonus]


def draw_recovered(target_row: SparseRow, draft_row: SparseRow, u: float) -> int:
    """The token at quantile u of max(target - draft, 0), normalised."""
    residual = target_row.probs / target_row.probs.sum(dtype=np.float64)  # float64 [k]
    draft_probs = draft_row.probs / draft_row.probs.sum(dtype=np.float64)
    places = np.minimum(np.searchsorted(target_row.ids, draft_row.ids), len(target_row.ids) - 1)
    common = target_row.ids[places] == draft_row.ids
    residual[places[common]] -= draft_probs[common]
    np.maximum(residual, 0.0, out=residual)
    if not residual.any():  # equal but for rounding: a draft is then rejected with probability 0
        return target_row.draw(u)
    return _draw(target_row.ids, residual, u)


def _draw(ids: npt.NDArray[np.integer[Any]], weights: npt.NDArray[np.floating[Any]], u: float) -> int:
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    if index >= len(ids):  # u times the sum was rounded up to the sum
        index = int(np.flatnonzero(weights)[-1])
    return int(ids[index])
