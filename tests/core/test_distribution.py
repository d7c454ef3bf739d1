"""Tokens are distributed as the target's own, whatever drafts for it: chi-square against exact probabilities.

The toy is a Markov chain: logits follow from the last token alone, so one text of 12,000 tokens gives 12,000 samples.
Contexts are the last *two* tokens, so that a correlation between neighbours, which a bias at accepted or recovered
tokens brings, shows as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from autopipe.core import verify
from autopipe.core.picker import Picker
from autopipe.core.plan import Verification
from autopipe.core.sampling import SamplingParams
from autopipe.core.verify import SparseRow
from autopipe.core.warpers import reference_mask

VOCAB = 6
SAMPLES = 12_000
WINDOW = 3
TABLES = [
    torch.from_numpy((np.random.default_rng(1).normal(size=(VOCAB, VOCAB)) * 1.5).astype(np.float32)),
]
for spread in (0.4, 0.9):  # the stages upstream of the target, each further from it
    change = np.random.default_rng(int(10 * spread)).normal(size=(VOCAB, VOCAB)) * spread
    TABLES.append(TABLES[0] + torch.from_numpy(change.astype(np.float32)))

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 0.9, "top_p": 0.8},
]


class Chain:
    """Stages that take turns, the first in the list the cheapest; every stage offers all it has drawn."""

    def __init__(self, params: SamplingParams, num_stages: int, rule: Verification) -> None:
        self.tables = TABLES[:num_stages][::-1]
        self.pickers = [
            Picker(
                params,
                vocab_size=VOCAB,
                prompt_length=1,
                rule=rule,
                stage=stage,
                is_target=stage == num_stages - 1,
            )
            for stage in range(num_stages)
        ]

    def extend(self, stage: int, tokens: list[int]) -> tuple[list[int], list[SparseRow] | None]:
        """What a stage adds to `tokens`: a window if it is the first, else one verification of the stage before."""
        if stage == 0:
            drafted: list[int] = []
            rows: list[SparseRow] = []
            for _ in range(WINDOW):
                own = self._verify(0, tokens + drafted, [], None)
                drafted, rows = drafted + own.token_ids, rows + (own.rows or [])
            return drafted, rows or None
        drafts, draft_rows = self.extend(stage - 1, tokens)
        verdict = self._verify(stage, tokens, drafts, draft_rows)
        return verdict.token_ids, verdict.rows

    def text(self, length: int = SAMPLES + 2) -> list[int]:
        tokens = [0]
        while len(tokens) < length:
            tokens += self.extend(len(self.pickers) - 1, tokens)[0]
        return tokens[:length]

    def _verify(self, stage: int, tokens: list[int], drafts: list[int], rows: list[SparseRow] | None) -> Any:
        logits = self.tables[stage][[tokens[-1], *drafts]]  # [n + 1, vocab]
        return self.pickers[stage].verify(logits, tokens, drafts, rows)


def exact(params: SamplingParams) -> np.ndarray:
    """The target's distribution after each token [vocab, vocab]."""
    scores = (TABLES[0] / params.temperature).numpy()
    scores = np.where([reference_mask(row, params) for row in scores], scores, -np.inf).astype(np.float64)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def p_value(tokens: list[int], probs: np.ndarray) -> float:
    """Chi-square of each next token given the last two; cells expected less than 5 times are pooled by context."""
    triples = np.array(tokens)
    observed = np.zeros((VOCAB, VOCAB, VOCAB))
    np.add.at(observed, (triples[:-2], triples[1:-1], triples[2:]), 1)
    statistic, freedom = 0.0, 0
    for before, last in np.ndindex(VOCAB, VOCAB):
        counts = observed[before, last]
        assert not counts[probs[last] == 0].any(), "a token that was filtered out"
        expected = counts.sum() * probs[last]
        small = expected < 5
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
        used = expected > 0.5
        if used.sum() > 1:
            statistic += (((counts - expected) ** 2)[used] / expected[used]).sum()
            freedom += int(used.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


@pytest.mark.parametrize("rule", list(Verification))
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_output_is_distributed_as_the_targets(options: dict[str, Any], num_stages: int, rule: Verification) -> None:
    params = SamplingParams(seed=11, **options)
    assert p_value(Chain(params, num_stages, rule).text(), exact(params)) > 1e-4


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_under_equality_chains_of_any_depth_write_the_same_text(options: dict[str, Any]) -> None:
    params = SamplingParams(seed=3, **options)
    texts = [Chain(params, num_stages, Verification.EQUALITY).text(2000) for num_stages in (1, 2, 3)]
    assert texts[0] == texts[1] == texts[2]


def recover_from_target(target_row: SparseRow, draft_row: SparseRow, u: float) -> int:
    return target_row.draw(u)


def test_a_verifier_that_recovers_from_the_wrong_distribution_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "draw_recovered", recover_from_target)
    params = SamplingParams(seed=11, temperature=1.0)
    assert p_value(Chain(params, 2, Verification.REJECTION).text(), exact(params)) < 1e-4


def lenient(drafts: list[int], pick: Callable[[int], int], ends: frozenset[int] = frozenset()) -> tuple[int, list[int]]:
    """Keeps every second block of drafts without asking."""
    lenient.calls += len(drafts) > 0
    if drafts and lenient.calls % 2 == 0:
        return len(drafts), [*drafts, pick(len(drafts))]
    return verify.verify_by_equality(drafts, pick, ends)


def test_a_verifier_that_sometimes_keeps_any_draft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lenient.calls = 0
    monkeypatch.setattr("autopipe.core.picker.verify_by_equality", lenient)
    params = SamplingParams(seed=11, temperature=1.0)
    assert p_value(Chain(params, 2, Verification.EQUALITY).text(), exact(params)) < 1e-4


def test_acceptance_under_rejection_is_one_minus_total_variation() -> None:
    params = SamplingParams(seed=2, temperature=1.0)
    chain, accepted, expected = Chain(params, 2, Verification.REJECTION), [], []
    target, draft = (torch.softmax(table, -1).numpy() for table in TABLES[:2])
    tokens = [0]
    while len(tokens) < 8000:
        own = chain._verify(0, tokens, [], None)
        verdict = chain._verify(1, tokens, own.token_ids, own.rows)
        accepted.append(verdict.num_accepted)
        expected.append(np.minimum(target[tokens[-1]], draft[tokens[-1]]).sum())
        tokens += verdict.token_ids
    assert np.mean(accepted) == pytest.approx(np.mean(expected), abs=4 * np.std(accepted) / np.sqrt(len(accepted)))
