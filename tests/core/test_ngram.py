"""The n-gram drafter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.errors import ConfigError
from autopipe.core.ngram import NgramDrafter
from autopipe.core.plan import NgramOptions

TOKENS = st.lists(st.integers(0, 4), min_size=1, max_size=40)


def drafter_with(tokens, **options):
    drafter = NgramDrafter(NgramOptions(**options))
    drafter.sync(tokens, 0)
    return drafter


def test_a_repetition_is_continued():
    assert drafter_with([1, 2, 3, 4, 5, 9, 1, 2]).draft(3).token_ids == [3, 4, 5]


def test_the_longest_match_wins():
    assert drafter_with([1, 2, 3, 9, 2, 4, 8, 1, 2]).draft(1).token_ids == [3]


def test_the_most_recent_of_equal_matches_wins():
    assert drafter_with([1, 2, 9, 1, 3, 8, 1]).draft(1).token_ids == [3]


def test_a_draft_hops_between_occurrences():
    assert drafter_with([5, 6, 7, 0, 6, 7, 8, 1, 5]).draft(3).token_ids == [6, 7, 0]
    assert drafter_with([5, 6, 0, 6, 7, 8, 6, 7, 9, 5]).draft(3).token_ids == [6, 0, 6]


def test_a_loop_is_continued_past_the_end_of_the_text():
    assert drafter_with([1, 2, 3, 1, 2, 3]).draft(7).token_ids == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_drafted_where_nothing_matches():
    assert drafter_with([1, 2, 3]).draft(4).token_ids == []


def test_nothing_is_drafted_before_the_first_sync():
    assert NgramDrafter(NgramOptions()).draft(4).token_ids == []


def test_min_order_forbids_short_matches():
    assert drafter_with([1, 2, 9, 1], min_order=2).draft(2).token_ids == []
    assert drafter_with([7, 1, 2, 9, 7, 1], min_order=2).draft(1).token_ids == [2]


@given(tokens=TOKENS, limit=st.integers(0, 20))
def test_a_draft_keeps_to_the_limit_and_has_a_confidence_each(tokens, limit):
    draft = drafter_with(tokens).draft(limit)
    assert len(draft.token_ids) <= limit
    assert len(draft.confidence) == len(draft.token_ids)
    assert all(0 < confidence < 1 for confidence in draft.confidence)


@given(tokens=TOKENS, order=st.integers(1, 4))
def test_every_draft_followed_its_context_in_the_text(tokens, order):
    draft = drafter_with(tokens, min_order=order, max_order=order + 2).draft(8)
    extended = tokens + draft.token_ids
    seen = {tuple(tokens[i : i + order + 1]) for i in range(len(tokens) - order)}
    for end in range(len(tokens), len(extended)):
        assert tuple(extended[end - order : end + 1]) in seen


@given(tokens=TOKENS)
def test_drafting_changes_nothing(tokens):
    drafter = drafter_with(tokens)
    assert drafter.draft(9) == drafter.draft(9)


@settings(max_examples=200)
@given(data=st.data())
def test_after_any_rollbacks_it_drafts_as_a_fresh_one_does(data):
    drafter = NgramDrafter(NgramOptions(max_order=4))
    sequence = []
    for _ in range(data.draw(st.integers(1, 6))):
        unchanged = data.draw(st.integers(0, len(sequence)))
        sequence = sequence[:unchanged] + data.draw(TOKENS)
        drafter.sync(sequence, unchanged)
    fresh = NgramDrafter(NgramOptions(max_order=4), calibration=drafter.calibration)
    fresh.sync(sequence, 0)
    assert fresh.draft(8) == drafter.draft(8)


@given(before=TOKENS, tokens=TOKENS)
def test_nothing_of_an_earlier_request_is_drafted(before, tokens):
    drafter = drafter_with(before)
    drafter.reset()
    drafter.sync(tokens, 0)
    assert drafter.draft(8) == drafter_with(tokens).draft(8)


def test_a_prompt_teaches_nothing():
    looping = drafter_with([1, 2] * 200)
    looping.reset()
    looping.sync([1, 2, 1], 0)
    assert looping.draft(1) == drafter_with([1, 2, 1]).draft(1)


def test_confidence_rises_with_right_proposals_that_were_never_verified():
    drafter = drafter_with([1, 2, 1, 2])
    before = drafter.draft(1).confidence[0]
    drafter.sync([1, 2] * 200, 4)
    drafter.reset()
    drafter.sync([1, 2, 1, 2], 0)
    assert drafter.draft(1).confidence[0] > before


def test_confidence_falls_with_wrong_proposals():
    drafter = drafter_with([1, 2, 1])
    before = drafter.draft(1).confidence[0]
    drafter.sync([1, 2, 1] + [token for i in range(3, 200) for token in (i, 1)], 3)
    drafter.reset()
    drafter.sync([1, 2, 1], 0)
    assert drafter.draft(1).confidence[0] < before


@pytest.mark.parametrize("unchanged", [-1, 3, 4])
def test_unchanged_beyond_either_sequence_is_an_error(unchanged):
    drafter = drafter_with([1, 2, 3])
    with pytest.raises(ConfigError, match="unchanged"):
        drafter.sync([1, 2], unchanged)


def test_a_very_long_streak_of_success_stays_in_range():
    assert drafter_with([1, 2] * 1000).draft(64).token_ids == [1, 2] * 32
