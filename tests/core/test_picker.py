"""A picker's verdicts: what is accepted, and that speculation never changes the tokens picked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from autopipe.core.errors import AutoPipeError
from autopipe.core.picker import MAX_ROW_TOKENS, Picker
from autopipe.core.plan import Verification
from autopipe.core.sampling import SamplingParams
from autopipe.core.verify import SparseRow
from tests.tiny import tiny_model

VOCAB = 50
PROMPT = [1, 2, 3]
RULES = list(Verification)


def logits_after(tokens: Sequence[int], vocab: int = VOCAB) -> torch.Tensor:
    """A toy model: logits [vocab] from the last two tokens."""
    seed = hash(tuple(tokens[-2:])) % 2**31
    return torch.from_numpy((np.random.default_rng(seed).normal(size=vocab) * 3).astype(np.float32))


def block(prefix: list[int], drafts: Sequence[int], vocab: int = VOCAB) -> torch.Tensor:
    """[n + 1, vocab]"""
    return torch.stack([logits_after([*prefix, *drafts[:j]], vocab) for j in range(len(drafts) + 1)])


def make(params: SamplingParams | None = None, **options: Any) -> Picker:
    return Picker(params or SamplingParams(), **{"vocab_size": VOCAB, "prompt_length": len(PROMPT), **options})


def plain(picker: Picker, length: int) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + length:
        tokens += picker.verify(block(tokens, []), tokens).token_ids
    return tokens


def speculative(picker: Picker, length: int, drafts_of: Any, log: list[int] | None = None) -> list[int]:
    """Drafts are the true continuation, spoiled at some places by `drafts_of(tokens, truth)`."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + length:
        drafts = drafts_of(tokens)
        verdict = picker.verify(block(tokens, drafts), tokens, drafts)
        if log is not None:
            log.append(verdict.num_accepted)
        tokens += verdict.token_ids
    return tokens[: len(PROMPT) + length]


def spoiled(truth: list[int]) -> Any:
    def drafts_of(tokens: list[int]) -> list[int]:
        rng = np.random.default_rng(len(tokens))
        return [
            token if rng.random() < 0.8 else int(rng.integers(VOCAB)) for token in truth[len(tokens) : len(tokens) + 5]
        ]

    return drafts_of


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "top_k": 8, "top_p": 0.9},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"temperature": 1.0, "repetition_penalty": 1.2, "min_new_tokens": 20, "logit_bias": {4: 2.0}},
    {"min_new_tokens": 10, "eos_token_ids": (4, 5)},
    {"temperature": 0.9, "num_logprobs": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_under_equality_the_tokens_are_those_of_plain_decoding(options: dict[str, Any]) -> None:
    params, accepted = SamplingParams(**options), list[int]()
    truth = plain(make(params), 60)
    assert speculative(make(params), 60, spoiled(truth), accepted) == truth
    assert 0 in accepted
    assert max(accepted) >= 4


def test_equal_seeds_give_equal_tokens_and_other_seeds_others() -> None:
    texts = [plain(make(SamplingParams(temperature=1.0, seed=seed)), 30) for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_greedy_picks_the_largest_logit_and_the_lower_id_of_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 9]] = 1
    assert make().verify(logits, PROMPT).token_ids == [7]


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rejection_and_equality_agree(rule: Verification) -> None:
    truth = plain(make(), 40)
    assert speculative(make(rule=rule), 40, spoiled(truth)) == truth


def test_greedy_penalties_follow_transformers_generate() -> None:
    model = tiny_model()
    prompt = list(range(20, 40))
    expected = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=40,
        repetition_penalty=1.3,
        min_new_tokens=40,
        sequence_bias={(33,): 1.5},
    )[0].tolist()
    params = SamplingParams(repetition_penalty=1.3, min_new_tokens=40, logit_bias={33: 1.5})
    picker = Picker(params, vocab_size=320, eos_token_ids=[257], prompt_length=len(prompt))
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(expected):
            tokens += picker.verify(model(torch.tensor([tokens])).logits[0, -1:], tokens).token_ids
    assert tokens == expected


def test_the_custom_processor_sees_each_prefix_once_in_order() -> None:
    seen: list[list[int]] = []

    def processor(tokens: list[int], scores: np.ndarray) -> np.ndarray:
        seen.append(list(tokens))
        return scores + 0.01 * len(seen)  # stateful

    truth = plain(make(processor=processor), 40)
    in_plain, seen[:] = list(seen), []
    assert speculative(make(processor=processor), 40, spoiled(truth)) == truth
    assert seen[: len(in_plain)] == in_plain


@pytest.mark.parametrize("rule", RULES)
def test_drafts_outside_the_vocabulary_are_never_accepted(rule: Verification) -> None:
    drafts = [VOCAB + 7, 3]
    verdict = make(SamplingParams(temperature=1.0), rule=rule).verify(block(PROMPT, drafts), PROMPT, drafts)
    assert verdict.num_accepted == 0
    assert verdict.token_ids[0] < VOCAB


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_picks_stay_below_vocab_size_on_a_padded_head(rule: Verification, temperature: float) -> None:
    logits = torch.zeros(1, VOCAB + 10)
    logits[:, VOCAB:] = 50
    picker = make(SamplingParams(temperature=temperature), rule=rule)
    for length in range(3, 30):
        assert picker.verify(logits, PROMPT * length).token_ids[0] < VOCAB


def test_a_padded_row_picks_as_an_unpadded_one() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    padded = torch.cat([block(PROMPT, [4, 5]), torch.full((3, 10), 99.0)], dim=1)
    expected = make(params).verify(block(PROMPT, [4, 5]), PROMPT, [4, 5])
    assert make(params).verify(padded, PROMPT, [4, 5]) == expected


@pytest.mark.parametrize("rule", RULES)
def test_logprobs_are_those_of_plain_decoding(rule: Verification) -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=4)
    tokens, expected = list(PROMPT), []
    picker = make(params)
    for _ in range(4):
        verdict = picker.verify(block(tokens, []), tokens)
        assert verdict.logprobs is not None
        expected += verdict.logprobs
        tokens += verdict.token_ids
    drafts = tokens[len(PROMPT) : -1]
    verdict = make(params, rule=rule).verify(block(PROMPT, drafts), PROMPT, drafts)
    assert verdict.num_accepted == 3
    assert verdict.logprobs == expected


def test_logprobs_only_when_asked_for_and_only_from_the_target() -> None:
    assert make().verify(block(PROMPT, []), PROMPT).logprobs is None
    drafter = make(SamplingParams(num_logprobs=2), is_target=False)
    assert drafter.verify(block(PROMPT, []), PROMPT).logprobs is None


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_best_ids_are_judged_as_the_logits_they_come_from(num_drafts: int) -> None:
    picker = make(eos_token_ids=[7])
    for first in range(20):
        prefix = [*PROMPT, first]
        truth: list[int] = []
        while len(truth) < num_drafts:
            truth += picker.verify(block([*prefix, *truth], []), [*prefix, *truth]).token_ids
        for spoil in range(num_drafts + 1):
            drafts = [token if place != spoil else (token + 1) % VOCAB for place, token in enumerate(truth)]
            logits = block(prefix, drafts)
            verdict = picker.verify_best(logits.argmax(1).tolist(), len(prefix), drafts)
            assert verdict == picker.verify(logits, prefix, drafts)


def test_no_best_id_is_an_error_where_it_is_needed() -> None:
    with pytest.raises(AutoPipeError, match="position 5"):
        make().verify_best([4, -1], 4, [4])
    assert make().verify_best([9, -1], 4, [4]).token_ids == [9]


@pytest.mark.parametrize(
    ("options", "settings", "taken"),
    [
        ({}, {}, True),
        ({"temperature": 0.7}, {}, False),
        ({"num_logprobs": 0}, {}, False),
        ({"num_logprobs": 0}, {"is_target": False}, True),
        ({"repetition_penalty": 1.1}, {}, False),
        ({"logit_bias": {3: 1.0}}, {}, False),
        ({"min_new_tokens": 5}, {"eos_token_ids": [7]}, False),
        ({}, {"rule": Verification.REJECTION}, False),
        ({}, {"processor": lambda ids, row: row}, False),
        ({}, {"vocab_size": VOCAB - 1}, False),
    ],
)
def test_best_ids_are_taken_where_nothing_else_of_the_logits_counts(
    options: dict[str, Any], settings: dict[str, Any], taken: bool
) -> None:
    assert make(SamplingParams(**options), **settings).takes_best(len(PROMPT), VOCAB) is taken


def test_a_drafters_rows_are_its_processed_distribution() -> None:
    params = SamplingParams(temperature=0.7, top_k=6)
    drafts = [4]
    picker = make(params, rule=Verification.REJECTION, is_target=False)
    verdict = picker.verify(block(PROMPT, drafts), PROMPT, drafts)
    assert verdict.rows is not None
    assert len(verdict.rows) == len(verdict.token_ids)
    values, ids = (logits_after(PROMPT) / 0.7).topk(6)
    order = ids.argsort()
    assert verdict.rows[0].ids.tolist() == ids[order].tolist()
    assert verdict.rows[0].probs.tolist() == pytest.approx(values.softmax(-1)[order].tolist(), rel=1e-5)


def test_a_drafters_rows_are_cut_and_the_targets_are_not_sent() -> None:
    vocab = 3 * MAX_ROW_TOKENS
    for is_target in (False, True):
        picker = make(
            SamplingParams(temperature=1.0), rule=Verification.REJECTION, is_target=is_target, vocab_size=vocab
        )
        rows = picker.verify(block(PROMPT, [], vocab), PROMPT).rows
        assert rows is None if is_target else rows is not None and len(rows[0].ids) == MAX_ROW_TOKENS


def test_no_rows_under_equality() -> None:
    picker = make(SamplingParams(temperature=1.0), is_target=False)
    assert picker.verify(block(PROMPT, []), PROMPT).rows is None


def test_drafts_without_rows_count_as_certain() -> None:
    params, drafts = SamplingParams(temperature=1.0), [4, 5]
    certain = [SparseRow.one_hot(draft) for draft in drafts]
    expected = make(params, rule=Verification.REJECTION).verify(block(PROMPT, drafts), PROMPT, drafts, certain)
    assert make(params, rule=Verification.REJECTION).verify(block(PROMPT, drafts), PROMPT, drafts) == expected


def test_the_requests_eos_ids_replace_the_models() -> None:
    params = SamplingParams(min_new_tokens=3, eos_token_ids=(7,))
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 5, 4
    assert make(params, eos_token_ids=[8]).verify(logits, PROMPT).token_ids == [8]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("value", "reason"), [(float("nan"), "NaN"), (-float("inf"), "every token is barred")])
def test_logits_that_allow_no_choice_are_an_error(
    value: float, reason: str, rule: Verification, temperature: float
) -> None:
    picker = make(SamplingParams(temperature=temperature), rule=rule)
    with pytest.raises(AutoPipeError, match=f"position 3: {reason}"):
        picker.verify(torch.full((1, VOCAB), value), PROMPT)


def test_logits_of_another_shape_are_an_error() -> None:
    with pytest.raises(AutoPipeError, match="do not fit 2 drafts"):
        make().verify(block(PROMPT, [4]), PROMPT, [4, 5])


def test_logits_are_left_unchanged() -> None:
    logits = block(PROMPT, [4])
    before = logits.clone()
    params = SamplingParams(temperature=0.5, repetition_penalty=2.0, top_k=3, logit_bias={4: 1.0}, num_logprobs=2)
    make(params).verify(logits, PROMPT, [4])
    assert torch.equal(logits, before)
