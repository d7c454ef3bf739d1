"""Token counts follow a sequence through growth and roll-back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from autopipe.core.token_counts import TokenCounts


def as_dict(counts: TokenCounts) -> dict[int, int]:
    return {int(token): int(count) for token, count in zip(counts.ids, counts.counts, strict=True)}


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 5), max_size=12)), max_size=12))
def test_counts_equal_a_fresh_count_after_any_rollbacks(steps: list[tuple[int, list[int]]]) -> None:
    counts, sequence = TokenCounts(), []
    for keep, new in steps:
        sequence = sequence[:keep] + new
        counts.update(sequence)
        assert as_dict(counts) == Counter(sequence)


def test_more_distinct_tokens_than_the_first_buffer() -> None:
    counts = TokenCounts()
    counts.update(range(1000))
    counts.update([*range(500), 7])
    assert as_dict(counts) == Counter([*range(500), 7])


def test_ids_come_in_order_of_first_occurrence() -> None:
    counts = TokenCounts()
    counts.update([5, 3, 5, 9])
    assert counts.ids.tolist() == [5, 3, 9]
