"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.errors import ConfigError
from autopipe.core.stops import StopMatcher


def feed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, given_out = StopMatcher(stops), ""
    for piece in pieces:
        text, found = matcher.push(piece)
        given_out += text
        if found:
            return given_out, True
    return given_out + matcher.finish(), False


def by_definition(stops: list[str], text: str) -> tuple[str, bool]:
    """Cut before the match that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(st.text("abc", max_size=6), max_size=8))
def test_stops_are_found_wherever_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    assert feed(stops, pieces) == by_definition(stops, "".join(pieces))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.text("abc", max_size=30))
def test_only_what_could_begin_a_stop_string_is_held(stops: list[str], text: str) -> None:
    matcher, given_out, seen = StopMatcher(stops), "", ""
    for character in text:
        new, found = matcher.push(character)
        given_out, seen = given_out + new, seen + character
        if found:
            return
        held = seen[len(given_out) :]
        assert seen == given_out + held
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(seen[i:]) for stop in stops for i in range(len(given_out)))


def test_text_held_is_given_when_it_turns_out_harmless() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.push("a<") == ("a", False)
    assert matcher.push("/b") == ("</b", False)


def test_text_held_at_the_end_is_flushed() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.finish() == "EN"


def test_without_stops_nothing_is_held() -> None:
    assert StopMatcher([]).push("anything") == ("anything", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="stop"):
        StopMatcher(["a", ""])
