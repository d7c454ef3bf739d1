"""The choice of tokens in one request at one stage: logits and drafts in, accepted and own tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from autopipe.core.errors import AutoPipeError
from autopipe.core.logprobs import TokenLogprobs, token_logprobs
from autopipe.core.noise import Float32Array, IntArray, Purpose, gumbel, gumbel_argmax, uniform
from autopipe.core.plan import Verification
from autopipe.core.processors import CustomProcessor, RowEditor
from autopipe.core.sampling import SamplingParams
from autopipe.core.verify import SparseRow, verify_by_equality, verify_by_rejection
from autopipe.core.warpers import warp

MAX_ROW_TOKENS = 1024
"""A drafter's distribution under the rejection rule: its likeliest tokens, renormalised, so that links stay small."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one verification (words: `verify.py`).

    Attributes:
        num_accepted: drafts kept.
        token_ids: the accepted tokens and, last, the recovered or bonus token; none of these after an accepted eos.
        rows: rejection rule, drafters only: for each of `token_ids` the distribution it was drawn from.
        logprobs: for each of `token_ids`, when the request asks for them and this is the target.
    """

    num_accepted: int
    token_ids: list[int]
    rows: list[SparseRow] | None = None
    logprobs: list[TokenLogprobs] | None = None


class Picker:
    """Chooses tokens for one request at one stage. Drafting and plain decoding are `verify` without drafts.

    Keeps token counts for penalties; they follow the `prefix` of each call, which may be shorter than, or differ from,
    that of the call before, but always begins with the same prompt.

    Args:
        params: the request's options; its `eos_token_ids`, where given, replace the model's.
        vocab_size: tokens this stage may pick: 0 to vocab_size - 1 (for a drafter, no more than the target knows).
        eos_token_ids: the model's own.
        prompt_length: tokens of the prompt.
        rule: how drafts are accepted.
        stage: number of the stage in its chain; keys the random numbers of the rejection rule.
        is_target: whether the tokens go to the user.
        processor: the user's own logits processor, for the target only: it sees each prefix once, in order, as in plain
            decoding, and never one behind a draft that was not accepted.

    Raises:
        ConfigError: logit_bias of a token outside the target's vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        prompt_length: int,
        rule: Verification = Verification.EQUALITY,
        stage: int = 0,
        is_target: bool = True,
        processor: CustomProcessor | None = None,
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._rule = rule
        self._stage = stage
        self._is_target = is_target
        self._ends = frozenset(eos_token_ids if params.eos_token_ids is None else params.eos_token_ids)
        self._all_ids: IntArray = np.arange(vocab_size)
        self._editor = RowEditor(
            params,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids if params.eos_token_ids is None else params.eos_token_ids,
            prompt_length=prompt_length,
            custom=processor,
            strict=is_target,
        )

    def verify(
        self,
        logits: torch.Tensor,
        prefix: Sequence[int],
        drafts: Sequence[int] = (),
        draft_rows: Sequence[SparseRow] | None = None,
    ) -> Verdict:
        """Accept drafts and add one token of this stage's own.

        Args:
            logits: float32 [n + 1, vocab]; row j follows prefix + drafts[:j]. Unchanged.
            prefix: prompt and output so far; the length of it is the absolute position of the first draft.
            drafts: n token ids; ids outside the vocabulary are never accepted.
            draft_rows: rejection rule: the distribution of each draft; None: they were certain (n-gram, greedy).

        Raises:
            AutoPipeError: logits of another shape, NaN logits, or every token barred.
            ConfigError: the custom processor returned a wrong shape.
        """
        rows = self._check(logits, len(drafts))
        if self._rule is Verification.REJECTION:
            verdict = self._verify_by_rejection(rows, prefix, drafts, draft_rows)
        else:
            verdict = self._verify_by_equality(rows, prefix, drafts)
        if self._params.num_logprobs is None or not self._is_target:
            return verdict
        logprobs = [
            token_logprobs(row, token_id, self._params.num_logprobs)
            for row, token_id in zip(rows, verdict.token_ids, strict=False)
        ]
        return Verdict(verdict.num_accepted, verdict.token_ids, logprobs=logprobs)

    def takes_best(self, length: int, vocab_size: int) -> bool:
        """Whether `verify_best` can take the place of `verify` after `length` tokens: greedy, with logits as they are.

        Args:
            vocab_size: of the backend whose best ids they are.
        """
        params = self._params
        return (
            params.greedy
            and self._rule is Verification.EQUALITY
            and vocab_size == self._vocab_size
            and (params.num_logprobs is None or not self._is_target)
            and not self._edits_any(length)
        )

    def verify_best(self, best: Sequence[int], length: int, drafts: Sequence[int] = ()) -> Verdict:
        """As `verify`, where `takes_best`.

        Args:
            best: n + 1 ids, of the largest logit after the prefix and after each draft; -1: there is none.
            length: of the prefix.

        Raises:
            AutoPipeError: no id where one is needed.
        """

        def pick(index: int) -> int:
            if best[index] < 0:
                raise AutoPipeError(f"no token can be chosen at position {length + index}: NaN logits")
            return best[index]

        return Verdict(*verify_by_equality(drafts, pick, self._ends))

    def _check(self, logits: torch.Tensor, num_drafts: int) -> Float32Array:
        """float32 [n + 1, vocab_size]"""
        if logits.dim() != 2 or logits.shape[0] != num_drafts + 1 or logits.shape[1] < self._vocab_size:
            raise AutoPipeError(
                f"logits of shape {tuple(logits.shape)} do not fit {num_drafts} drafts and {self._vocab_size} tokens"
            )
        rows: Float32Array = logits.detach().to("cpu", torch.float32).contiguous().numpy()
        return rows[:, : self._vocab_size]

    def _verify_by_equality(self, rows: Float32Array, prefix: Sequence[int], drafts: Sequence[int]) -> Verdict:
        edited = self._edited_rows(rows, prefix, drafts)

        if self._params.greedy and not self._edits_any(len(prefix)):
            best = rows.argmax(axis=1)  # [n + 1]

            def pick(index: int) -> int:
                token_id = int(best[index])
                _check_score(rows[index, token_id], len(prefix) + index)
                return token_id

        else:

            def pick(index: int) -> int:
                ids, scores = self._warped(edited(index), len(prefix) + index)
                place = self._noisy_argmax(ids, scores, len(prefix) + index)
                return place if ids is None else int(ids[place])

        num_accepted, token_ids = verify_by_equality(drafts, pick, self._ends)
        return Verdict(num_accepted, token_ids)

    def _verify_by_rejection(
        self,
        rows: Float32Array,
        prefix: Sequence[int],
        drafts: Sequence[int],
        draft_rows: Sequence[SparseRow] | None,
    ) -> Verdict:
        own_rows: list[SparseRow] = []
        edited = self._edited_rows(rows, prefix, drafts)

        def own_row(index: int) -> SparseRow:
            own_rows.append(self._distribution(edited(index), len(prefix) + index))
            return own_rows[-1]

        def random(index: int, purpose: Purpose) -> float:
            return uniform(self._params.seed, self._stage, len(prefix) + index, purpose)

        if draft_rows is None:
            draft_rows = [SparseRow.one_hot(draft) for draft in drafts]
        num_accepted, token_ids = verify_by_rejection(drafts, draft_rows, own_row, random, self._ends)
        return Verdict(num_accepted, token_ids, rows=None if self._is_target else own_rows)

    def _edits_any(self, length: int) -> bool:
        """Whether any row of a block after `length` tokens is edited: bars on eos only end as a text grows."""
        return self._editor.edits(length)

    def _edited_rows(
        self, rows: Float32Array, prefix: Sequence[int], drafts: Sequence[int]
    ) -> Callable[[int], Float32Array]:
        """A function of j = 0, 1, ..., to be called in order, that gives row j with the request's edits."""
        if not self._editor.needs_tokens:
            return lambda index: self._editor.edit(rows[index], None, len(prefix) + index)
        tokens = list(prefix)

        def edited(index: int) -> Float32Array:
            tokens.extend(drafts[len(tokens) - len(prefix) : index])
            return self._editor.edit(rows[index], tokens, len(tokens))

        return edited

    def _warped(self, row: Float32Array, position: int) -> tuple[IntArray | None, Float32Array]:
        _check_score(row.max(), position)
        return (None, row) if self._params.greedy else warp(row, self._params)

    def _noisy_argmax(self, ids: IntArray | None, scores: Float32Array, position: int) -> int:
        """The place in `scores` of argmax(score + noise); scores are log probs plus a constant, which cannot matter."""
        if self._params.greedy:
            return int(scores.argmax())
        if ids is None:
            return gumbel_argmax(scores, self._params.seed, position)
        return int(np.argmax(scores + gumbel(self._params.seed, position, ids)))

    def _distribution(self, row: Float32Array, position: int) -> SparseRow:
        """This stage's processed distribution; a drafter's is cut to MAX_ROW_TOKENS."""
        ids, scores = self._warped(row, position)
        if self._params.greedy:
            return SparseRow.one_hot(int(scores.argmax()))
        best = scores.max()
        if not np.isfinite(best):
            raise AutoPipeError(f"infinite logits at position {position}: no distribution to sample from")
        weights: npt.NDArray[np.float32] = np.exp(scores - best)
        probs = weights / weights.sum(dtype=np.float64).astype(np.float32)
        own = SparseRow(self._all_ids if ids is None else ids, probs)
        return own if self._is_target else own.truncated(MAX_ROW_TOKENS)


def _check_score(score: np.float32, position: int) -> None:
    if not score > -np.inf:
        reason = "NaN logits" if np.isnan(score) else "every token is barred"
        raise AutoPipeError(f"no token can be chosen at position {position}: {reason}")
