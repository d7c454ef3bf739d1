"""What happens to one row of logits before a token is chosen, in transformers' order.

logit_bias, repetition penalty, frequency and presence penalty (OpenAI's, over the output only), min_new_tokens, the
caller's own processor; then, when sampling, temperature, top_k, top_p, min_p (`warpers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopipe.core.errors import ConfigError
from autopipe.core.noise import Float32Array
from autopipe.core.sampling import SamplingParams
from autopipe.core.token_counts import TokenCounts

CustomProcessor = Callable[[list[int], Float32Array], Float32Array]
"""(all token ids so far, scores float32 [vocab]) -> scores float32 [vocab]; may work in place."""


class RowEditor:
    """Everything before the warpers, for one request; holds token counts that follow the sequence.

    Args:
        vocab_size: length of the rows.
        eos_token_ids: ids that `min_new_tokens` bars.
        prompt_length: tokens of the prompt; those after it are output.
        custom: the caller's own processor, or None.
        strict: refuse a logit_bias outside the vocabulary; otherwise it is ignored (a drafter with fewer tokens).

    Raises:
        ConfigError: see `strict`.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        prompt_length: int,
        custom: CustomProcessor | None = None,
        strict: bool = True,
    ) -> None:
        self._params = params
        self._prompt_length = prompt_length
        self._custom = custom
        self._eos = np.array([eos for eos in eos_token_ids if 0 <= eos < vocab_size], dtype=np.int64)
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
        if strict and len(bias) < len(params.logit_bias):
            outside = min(set(params.logit_bias) - set(bias))
            raise ConfigError("logit_bias", outside, f"token ids from 0 to {vocab_size - 1}")
        self._bias_ids = np.array(list(bias), dtype=np.int64)
        self._bias_values = np.array(list(bias.values()), dtype=np.float32)
        self._all = TokenCounts() if params.repetition_penalty != 1 else None
        self._output = TokenCounts() if params.frequency_penalty or params.presence_penalty else None
        self._always = bool(bias) or self.needs_tokens

    @property
    def needs_tokens(self) -> bool:
        """Whether `edit` reads more of the sequence than its length."""
        return self._all is not None or self._output is not None or self._custom is not None

    def edits(self, length: int) -> bool:
        """Whether `edit` changes a row after `length` tokens."""
        return self._always or (self._bars_eos(length) and len(self._eos) > 0)

    def edit(self, row: Float32Array, tokens: Sequence[int] | None, length: int) -> Float32Array:
        """The row with biases, penalties, bars and the custom processor applied.

        Args:
            row: logits [vocab]; unchanged.
            tokens: the `length` tokens before this row; may be None unless `needs_tokens`.

        Returns:
            scores [vocab]; `row` itself where nothing applies.

        Raises:
            ConfigError: the custom processor returned another shape.
        """
        if not self.edits(length):
            return row
        scores = row.copy()
        scores[self._bias_ids] += self._bias_values
        if tokens is not None:
            self._penalise(scores, tokens)
        if self._bars_eos(length):
            scores[self._eos] = -np.inf
        if self._custom is not None and tokens is not None:
            scores = _customised(self._custom, scores, list(tokens))
        return scores

    def _bars_eos(self, length: int) -> bool:
        return length - self._prompt_length < self._params.min_new_tokens

    def _penalise(self, scores: Float32Array, tokens: Sequence[int]) -> None:
        """In place. Counts may hold tokens of a larger vocabulary than this stage's."""
        if self._all is not None:
            self._all.update(tokens)
            ids = self._all.ids[self._all.ids < len(scores)]
            seen, penalty = scores[ids], np.float32(self._params.repetition_penalty)
            scores[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        if self._output is not None:
            self._output.update(tokens[self._prompt_length :])
            inside = self._output.ids < len(scores)
            per_count, once = np.float32(self._params.frequency_penalty), np.float32(self._params.presence_penalty)
            scores[self._output.ids[inside]] -= self._output.counts[inside] * per_count + once


def _customised(custom: CustomProcessor, scores: Float32Array, tokens: list[int]) -> Float32Array:
    result = np.asarray(custom(tokens, scores))
    if result.shape != scores.shape:
        raise ConfigError("logits_processor", result.shape, f"a result of shape {scores.shape}")
    return np.ascontiguousarray(result, dtype=np.float32)
