"""The suffix index against a rescan of the whole sequence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.core.errors import ConfigError
from autopipe.core.ngram_index import SuffixIndex

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def build(tokens, min_order=1, max_order=4):
    index = SuffixIndex(min_order, max_order)
    for token in tokens:
        index.push(token)
    return index


def rescan(tokens, text, min_order, max_order):
    """Longest suffix of `text` with a successor in `tokens`, by brute force."""
    for order in range(min(max_order, len(text)), min_order - 1, -1):
        suffix = text[-order:]
        successors = [tokens[i] for i in range(order, len(tokens)) if tokens[i - order : i] == suffix]
        if successors:
            return order, successors
    return None


@given(tokens=TOKENS, text=TOKENS, orders=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted))
def test_match_equals_a_rescan(tokens, text, orders):
    index = build(tokens, *orders)
    for suffix in (text, index.tail(8)):
        found = index.match(suffix)
        expected = rescan(tokens, suffix, *orders)
        assert (found and (found.order, list(found.successors))) == expected


@given(kept=TOKENS, dropped=TOKENS, regrown=TOKENS)
def test_rolled_back_and_regrown_equals_built_anew(kept, dropped, regrown):
    index = build(kept + dropped)
    for token in reversed(dropped):
        assert index.pop() == token
    for token in regrown:
        index.push(token)
    fresh = build(kept + regrown)
    assert vars(index) == vars(fresh)


@given(tokens=TOKENS)
def test_cleared_index_equals_a_new_one(tokens):
    index = build(tokens)
    index.clear()
    assert vars(index) == vars(SuffixIndex(1, 4))


def test_tail_is_the_last_tokens():
    assert build([1, 2, 3, 4, 5]).tail(3) == [3, 4, 5]
    assert build([1, 2]).tail(3) == [1, 2]


def test_large_token_ids_do_not_collide():
    index = build([2**32 - 1, 7, 0, 8])
    assert index.match([2**32 - 1]).successors == [7]
    assert index.match([0]).successors == [8]


def test_popping_an_empty_index_is_an_error():
    with pytest.raises(ConfigError, match="at least one token"):
        SuffixIndex(1, 2).pop()
