"""What a drafter that works ahead knows of one request, against a sequence kept naively."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopipe.core.shared.ahead_lane import Lane
from tests.core.shared.requests import request

TOKENS = st.lists(st.integers(0, 1), max_size=4)


def lane(tokens: list[int], end: int = 100, eos: tuple[int, ...] = ()) -> Lane:
    return Lane.of(request(0, tokens, eos=eos, max_new_tokens=end - len(tokens)))


def test_drafts_that_go_on_from_the_consumers_text_stay() -> None:
    one = lane([7])
    one.begin(4)
    one.take([1, 2, 3], has_read=True)
    assert one.drafts == [1, 2, 3]
    one.tell([7, 1], [])
    assert one.drafts == [2, 3]
    one.tell([7, 1], [2])
    assert one.drafts == [3]
    assert one.cut is None


def test_drafts_for_another_text_are_dropped_and_what_was_read_of_them_too() -> None:
    one = lane([7])
    one.begin(4)
    one.take([1, 2, 3], has_read=True)
    one.tell([7, 1, 5], [])
    assert one.drafts == []
    assert one.cut == 2


def test_a_draft_under_way_is_taken_where_the_consumer_came_to_the_same() -> None:
    one = lane([7])
    one.begin(4)
    one.take([1, 2], has_read=True)
    one.begin(4)
    one.tell([7, 1, 2, 3], [])
    one.take([3, 4], has_read=True)
    assert one.drafts == [4]
    assert one.cut is None


def test_there_is_no_room_after_the_end_of_a_text() -> None:
    one = lane([7], end=6, eos=(9,))
    assert one.room(8, 99) == 4, "the target appends the last token itself"
    assert one.room(8, 3) == 2
    one.begin(4)
    one.take([1, 9], has_read=True)
    assert one.room(8, 99) == 0


@given(st.data())
def test_its_sequence_is_always_the_consumers_and_what_goes_on_from_it(data: st.DataObject) -> None:
    text, extra = [5], list[int]()
    one = lane(list(text))
    cached = 0  # a KV cache of this many tokens of `in_cache`
    in_cache: list[int] = []
    under_way = False
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["tell", "begin", "take"]))
        if action == "tell":
            settled, keeps = text + extra, data.draw(st.integers(0, 4))
            text = settled[: max(len(text), len(settled) - keeps)] + data.draw(TOKENS)
            extra = data.draw(TOKENS)
            one.tell(text, extra)
        elif action == "begin" and not under_way:
            under_way = True
            want = one.begin(8)
            if one.cut is not None:
                cached, one.cut = min(cached, one.cut), None
                del in_cache[cached:]
            assert want.request.tokens == text
            assert in_cache == (text + want.extra)[:cached], "what is cached is of the text to go on from"
        elif action == "take" and under_way:
            under_way = False
            known = one.mirror.tokens + list(one.under_way or ())
            new = data.draw(TOKENS)
            one.take(new, has_read=bool(new))
            in_cache, cached = known + new, len(known + new)
        sequence = one.mirror.tokens + one.tail
        assert sequence[: len(text + extra)] == text + extra
        assert one.drafts == sequence[len(text + extra) :]
