"""Which finished sequences are kept, and for whom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.core.shared.prefix_cache import PrefixCache, common_length


def array(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_the_common_beginning_is_counted_right(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_length(array(a), array(b)) == expected


def test_the_longest_common_beginning_is_found() -> None:
    cache = PrefixCache(4)
    cache.put(0, [1] * 10)
    cache.put(1, [1] * 12 + [2] * 8)
    assert cache.find(array([1] * 12 + [2, 3])) == (1, 13)
    assert cache.find(array([7, 8, 9]))[1] == 0


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(2)
    assert cache.put(0, list(range(0, 20))) == []
    assert cache.put(1, list(range(50, 70))) == []
    cache.find(array(list(range(0, 20))))
    assert cache.put(2, list(range(90, 110))) == [1]


def test_what_a_longer_sequence_holds_is_not_kept_twice() -> None:
    cache = PrefixCache(4)
    cache.put(0, list(range(20)))
    assert cache.put(1, list(range(30))) == [0]
    assert cache.put(2, list(range(25))) == [2]
    assert len(cache) == 1


def test_what_is_too_short_to_be_worth_it_is_not_kept() -> None:
    assert PrefixCache(4).put(0, [1, 2]) == [0]
    assert PrefixCache(0).put(0, list(range(50))) == [0]


def test_clearing_gives_all_slots_back() -> None:
    cache = PrefixCache(4)
    cache.put(0, list(range(20)))
    cache.put(1, list(range(40, 60)))
    assert sorted(cache.clear()) == [0, 1]
    with pytest.raises(KeyError):
        cache.evict()
