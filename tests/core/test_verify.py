"""The two verification rules as pure functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from autopipe.core.errors import AutoPipeError
from autopipe.core.noise import Purpose
from autopipe.core.verify import SparseRow, draw_recovered, verify_by_equality, verify_by_rejection


def row(**probs: float) -> SparseRow:
    """row(a=0.5, c=0.5): tokens 0 and 2."""
    items = sorted((ord(name) - ord("a"), prob) for name, prob in probs.items())
    return SparseRow(np.array([i for i, _ in items]), np.array([p for _, p in items], dtype=np.float32))


def always(value: float) -> Callable[[int, Purpose], float]:
    return lambda index, purpose: value


@pytest.mark.parametrize(
    ("drafts", "picks", "accepted", "tokens"),
    [
        ([], [5], 0, [5]),
        ([5, 6], [5, 6, 7], 2, [5, 6, 7]),
        ([5, 6], [5, 9, 7], 1, [5, 9]),
        ([5, 6], [8, 6, 7], 0, [8]),
    ],
    ids=["plain", "all-and-bonus", "recovered", "first-wrong"],
)
def test_equality_keeps_drafts_up_to_the_first_mismatch(
    drafts: list[int], picks: list[int], accepted: int, tokens: list[int]
) -> None:
    assert verify_by_equality(drafts, picks.__getitem__) == (accepted, tokens)


def test_equality_picks_in_order_and_not_beyond_the_mismatch() -> None:
    asked: list[int] = []

    def pick(index: int) -> int:
        asked.append(index)
        return [5, 9, 7][index]

    verify_by_equality([5, 6, 7], pick)
    assert asked == [0, 1]


def test_rejection_keeps_a_draft_the_verifier_likes_at_least_as_much() -> None:
    result = verify_by_rejection([0], [row(a=0.5, b=0.5)], lambda j: [row(a=0.5, b=0.5), row(c=1.0)][j], always(0.999))
    assert result == (1, [0, 2])


@pytest.mark.parametrize(("u", "accepted"), [(0.49, 1), (0.51, 0)])
def test_rejection_keeps_a_draft_with_the_ratio_of_probabilities(u: float, accepted: int) -> None:
    rows = [row(a=0.4, b=0.6), row(a=1.0)]
    assert verify_by_rejection([0], [row(a=0.8, b=0.2)], rows.__getitem__, always(u))[0] == accepted


def test_rejection_never_keeps_what_the_verifier_cannot_say() -> None:
    rows = [row(b=1.0)]
    assert verify_by_rejection([0], [row(a=1.0)], rows.__getitem__, always(0.0)) == (0, [1])


def test_rejection_of_a_certain_draft_never_recovers_it() -> None:
    rows = [row(a=0.3, b=0.7)]
    assert verify_by_rejection([0], [SparseRow.one_hot(0)], rows.__getitem__, always(0.9)) == (0, [1])


def test_rejection_reads_no_row_beyond_the_rejected_draft() -> None:
    rows = [row(b=1.0)]
    verify_by_rejection([0, 0, 0], [SparseRow.one_hot(0)] * 3, rows.__getitem__, always(0.5))


def test_rejection_without_drafts_draws_from_the_verifier() -> None:
    rows = [row(a=0.25, d=0.75)]
    assert verify_by_rejection([], [], rows.__getitem__, always(0.2)) == (0, [0])
    assert verify_by_rejection([], [], rows.__getitem__, always(0.3)) == (0, [3])


def test_a_draft_outside_its_own_row_is_an_error() -> None:
    with pytest.raises(AutoPipeError, match="draft token 7"):
        verify_by_rejection([7], [row(a=1.0)], lambda j: row(a=1.0), always(0.5))


def test_recovered_tokens_come_from_the_positive_part_of_the_difference() -> None:
    target, draft = row(a=0.5, b=0.3, c=0.2), row(a=0.2, b=0.6, e=0.2)  # difference: a 0.3, c 0.2
    drawn = [draw_recovered(target, draft, u) for u in np.linspace(0, 0.9999, 1000)]
    assert drawn.count(0) == pytest.approx(600, abs=2)
    assert drawn.count(2) == pytest.approx(400, abs=2)


def test_equal_distributions_recover_from_the_verifier() -> None:
    assert draw_recovered(row(a=0.5, b=0.5), row(a=0.5, b=0.5), 0.75) == 1


def test_a_drawn_token_is_the_quantile_in_order_of_ids() -> None:
    some = row(b=0.25, d=0.5, e=0.25)
    assert [some.draw(u) for u in (0.0, 0.24, 0.26, 0.74, 0.76, 1 - 2**-53)] == [1, 1, 3, 3, 4, 4]


def test_tokens_without_probability_are_never_drawn() -> None:
    some = row(a=0.0, b=1.0, c=0.0)
    assert {some.draw(u) for u in (0.0, 0.5, 1 - 2**-53)} == {1}


def test_truncation_keeps_the_likeliest_in_order_of_ids_and_renormalises() -> None:
    cut = row(a=0.1, b=0.4, c=0.2, d=0.3).truncated(2)
    assert cut.ids.tolist() == [1, 3]
    assert cut.probs.tolist() == pytest.approx([4 / 7, 3 / 7])


def test_probability_of_absent_tokens_is_zero() -> None:
    some = row(b=0.5, d=0.5)
    assert [some.prob(token) for token in range(6)] == [0, 0.5, 0, 0.5, 0, 0]
