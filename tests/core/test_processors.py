"""Edits of logits rows: transformers' values in transformers' order, OpenAI's penalties, any prefix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList

from autopipe.core.errors import ConfigError
from autopipe.core.processors import RowEditor
from autopipe.core.sampling import SamplingParams
from autopipe.core.warpers import warp

VOCAB = 500
PROMPT = [3, 4, 5, 4, 499]
EOS = (7, 9)


def make(params: SamplingParams, **options: Any) -> RowEditor:
    return RowEditor(params, **{"vocab_size": VOCAB, "eos_token_ids": EOS, "prompt_length": len(PROMPT), **options})


def random_row(seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=VOCAB) * 4).astype(np.float32)


class Doubler(LogitsProcessor):
    """Not linear in what comes before or after it, so its place in the order shows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * 2 + input_ids.shape[1]


def transformers_processed(row: np.ndarray, tokens: list[int], params: SamplingParams, custom: bool) -> np.ndarray:
    """What `generate` does, by the list of processors that it builds itself."""
    config = GenerationConfig(
        do_sample=not params.greedy,
        temperature=params.temperature or None,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
        sequence_bias={(token,): bias for token, bias in params.logit_bias.items()} or None,
    )
    config._eos_token_tensor = torch.tensor(EOS)
    mixin = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=lambda own, extra: GenerationMixin._merge_criteria_processor_list(
            None, own, extra
        ),
    )
    processors = GenerationMixin._get_logits_processor(
        mixin,
        config,
        input_ids_seq_length=len(PROMPT),
        encoder_input_ids=torch.tensor([PROMPT]),
        logits_processor=LogitsProcessorList([Doubler()] if custom else []),
    )
    return processors(torch.tensor([tokens]), torch.from_numpy(row.copy())[None])[0].numpy()


def double(tokens: list[int], scores: np.ndarray) -> np.ndarray:
    return Doubler()(torch.tensor([tokens]), torch.from_numpy(scores)[None])[0].numpy()


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"min_new_tokens": 4},
        {"logit_bias": {3: 5.0, 7: -2.5, 499: 100.0}},
        {"repetition_penalty": 1.7, "logit_bias": {4: 3.0}, "min_new_tokens": 3},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
        {"temperature": 1.3, "top_p": 0.8, "logit_bias": {4: 3.0}, "min_new_tokens": 9},
    ],
    ids=str,
)
def test_rows_equal_those_of_transformers_generate(options: dict[str, Any], custom: bool) -> None:
    params = SamplingParams(**options)
    editor = make(params, custom=double if custom else None)
    for output in ([], [4], [4, 8, 8], [7, 8, 9, 10, 11]):
        row, tokens = random_row(len(output)), PROMPT + output
        ours = editor.edit(row, tokens, len(tokens))
        if not params.greedy:
            ids, scores = warp(ours, params)
            ours = np.full_like(row, -np.inf)
            ours[slice(None) if ids is None else ids] = scores
        assert np.array_equal(ours, transformers_processed(row, tokens, params, custom))


def test_frequency_penalty_is_per_occurrence_in_the_output() -> None:
    row = random_row()
    edited = make(SamplingParams(frequency_penalty=0.5)).edit(row, [*PROMPT, 8, 8, 10], len(PROMPT) + 3)
    expected = row.copy()
    expected[8] -= 1.0
    expected[10] -= 0.5
    assert np.array_equal(edited, expected)


def test_presence_penalty_is_once_for_tokens_in_the_output() -> None:
    row = random_row()
    edited = make(SamplingParams(presence_penalty=-0.5)).edit(row, [*PROMPT, 8, 8, 10], len(PROMPT) + 3)
    expected = row.copy()
    expected[[8, 10]] += 0.5
    assert np.array_equal(edited, expected)


def test_penalties_after_a_rollback_are_those_of_the_new_text() -> None:
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2)
    editor, row = make(params), random_row()
    for output in ([8, 9, 10], [8, 11], [8, 9, 10, 8, 8], []):
        tokens = PROMPT + output
        assert np.array_equal(editor.edit(row, tokens, len(tokens)), make(params).edit(row, tokens, len(tokens)))


def test_eos_is_barred_until_min_new_tokens() -> None:
    editor, row = make(SamplingParams(min_new_tokens=2)), random_row()
    barred = editor.edit(row, None, len(PROMPT) + 1)
    assert np.flatnonzero(barred == -np.inf).tolist() == list(EOS)
    assert editor.edit(row, None, len(PROMPT) + 2) is row


def test_a_smaller_vocabulary_ignores_tokens_it_lacks() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={400: 1.0}, min_new_tokens=5)
    editor = make(params, vocab_size=100, eos_token_ids=(7, 300), strict=False)
    edited = editor.edit(random_row()[:100], [*PROMPT, 450], len(PROMPT) + 1)
    assert np.flatnonzero(edited != random_row()[:100]).tolist() == [3, 4, 5, 7]


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logit_bias: 500 .* 0 to 499"):
        make(SamplingParams(logit_bias={500: 1.0}))


def test_a_custom_processor_of_wrong_shape_is_refused() -> None:
    editor = make(SamplingParams(), custom=lambda tokens, scores: scores[:-1])
    with pytest.raises(ConfigError, match="logits_processor"):
        editor.edit(random_row(), PROMPT, len(PROMPT))


def test_a_custom_processor_may_work_in_place_and_the_row_stays() -> None:
    def erase(tokens: list[int], scores: np.ndarray) -> np.ndarray:
        scores[:] = 0
        return scores

    editor, row = make(SamplingParams(), custom=erase), random_row()
    assert not editor.edit(row, PROMPT, len(PROMPT)).any()
    assert np.array_equal(row, random_row())
