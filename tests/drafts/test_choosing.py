"""The most probable tokens, and a choice among them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from autopipe.drafts.choosing import sample, top_logprobs


@pytest.mark.parametrize("vocab", [30, 64, 259, 4096, 5003])
def test_they_are_those_of_a_full_sort(vocab: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    token_ids, logprobs = top_logprobs(logits)
    values, expected = logits.log_softmax(dim=1).topk(min(64, vocab), dim=1)

    assert np.array_equal(token_ids, expected.numpy())
    assert np.allclose(logprobs, values.numpy(), atol=1e-5)


def test_of_equal_logits_the_smallest_id_comes_first() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [4000, 70, 71]] = 1.0

    assert top_logprobs(logits)[0][0, :5].tolist() == [70, 71, 4000, 0, 1]


def test_temperature_zero_takes_the_first() -> None:
    assert sample(np.array([7, 8]), np.array([-1.0, -1.0], dtype=np.float32), 0.0, 1.0, random.Random(0)) == 7


def test_tokens_are_drawn_by_their_probability() -> None:
    token_ids, logprobs = np.array([1, 2, 3]), np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    chooser = random.Random(0)
    drawn = [sample(token_ids, logprobs, 1.0, 1.0, chooser) for _ in range(4000)]

    for token, probability in zip((1, 2, 3), (0.5, 0.3, 0.2), strict=True):
        assert drawn.count(token) / 4000 == pytest.approx(probability, abs=0.03)


def test_top_p_leaves_out_the_tail() -> None:
    token_ids, logprobs = np.array([1, 2, 3]), np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    chooser = random.Random(0)

    assert {sample(token_ids, logprobs, 1.0, 0.7, chooser) for _ in range(300)} == {1, 2}
