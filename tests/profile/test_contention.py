from __future__ import annotations

from autopipe.profile.contention import overlap, within


def test_overlap_is_from_the_last_start_to_the_first_end() -> None:
    assert overlap([[(0.0, 1.0), (1.0, 5.0)], [(2.0, 3.0), (3.0, 4.0)]]) == (2.0, 4.0)


def test_only_forwards_wholly_within_count() -> None:
    assert within([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)], (0.5, 2.5)) == [(1.0, 2.0)]
