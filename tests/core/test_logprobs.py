"""Log-probabilities of the raw model distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autopipe.core.logprobs import token_logprobs

ROW = (np.random.default_rng(0).normal(size=5000) * 5).astype(np.float32)


def test_the_chosen_tokens_logprob_is_log_softmax() -> None:
    expected = torch.log_softmax(torch.from_numpy(ROW).double(), -1)
    for token_id in (0, 17, int(ROW.argmax())):
        assert token_logprobs(ROW, token_id, 0).logprob == pytest.approx(float(expected[token_id]), abs=1e-5)


def test_the_top_tokens_come_likeliest_first() -> None:
    values, ids = torch.log_softmax(torch.from_numpy(ROW).double(), -1).topk(5)
    top = token_logprobs(ROW, 3, 5).top
    assert [token_id for token_id, _ in top] == ids.tolist()
    assert [logprob for _, logprob in top] == pytest.approx(values.tolist(), abs=1e-5)


def test_equal_tokens_come_in_order_of_ids() -> None:
    top = token_logprobs(np.array([1, 2, 2, 0, 2], dtype=np.float32), 0, 2).top
    assert [token_id for token_id, _ in top] == [1, 2]


def test_no_more_top_tokens_than_the_vocabulary_has() -> None:
    assert len(token_logprobs(np.zeros(3, dtype=np.float32), 0, 20).top) == 3


@pytest.mark.parametrize("offset", range(1, 20, 3))
def test_figures_do_not_depend_on_where_the_row_lies_in_memory(offset: int) -> None:
    buffer = np.empty(len(ROW) + offset, dtype=np.float32)
    buffer[offset:] = ROW
    assert token_logprobs(buffer[offset:], 5, 5) == token_logprobs(ROW, 5, 5)


def test_barred_tokens_have_no_effect() -> None:
    row = np.array([0.0, -np.inf, 0.0], dtype=np.float32)
    assert token_logprobs(row, 0, 0).logprob == pytest.approx(-np.log(2))
