"""Blocks of tokens to text deltas, up to the first stop string."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.models import DEFAULT_MODEL, load_tokenizer, resolve
from autopipe.core.text import OutputText, TextDelta
from tests.core.test_stops import by_definition
from tests.core.tokenizers_in_code import byte_fallback, byte_level, full_decode

TOKENIZER = byte_level()
BYTE_FALLBACK = byte_fallback()


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False).input_ids)


def run(tokenizer: Any, stop: list[str], ids: list[int], cuts: list[int]) -> tuple[str, int, bool]:
    """Text, tokens used and whether stopped, from blocks that end at `cuts`."""
    output, text, used = OutputText(tokenizer, stop), "", 0
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for start, end in pairwise(borders):
        delta = output.push(ids[start:end])
        text, used = text + delta.text, used + delta.num_tokens_used
        if delta.stopped:
            return text, used, True
    return text + output.finish(), used, output.stopped


@settings(max_examples=150, deadline=None)
@given(
    st.text("ab é日🙂\u0301", max_size=30),
    st.lists(st.text("ab é日🙂", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_text_is_cut_before_the_first_stop_however_tokens_are_blocked(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    ids = ids_of(text)
    shown, used, stopped = run(TOKENIZER, stop, ids, cuts)
    assert (shown, stopped) == by_definition(stop, text)
    assert used == run(TOKENIZER, stop, ids, list(range(len(ids))))[1]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 275), max_size=40),
    st.lists(st.text(" acs日é🙂\ufffd", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_any_tokens_of_a_sentencepiece_vocabulary(ids: list[int], stop: list[str], cuts: list[int]) -> None:
    shown, used, stopped = run(BYTE_FALLBACK, stop, ids, cuts)
    assert (shown, stopped) == by_definition(stop, full_decode(BYTE_FALLBACK, ids))
    assert used == run(BYTE_FALLBACK, stop, ids, list(range(len(ids))))[1]


def test_a_stop_inside_a_block_says_how_many_tokens_were_used() -> None:
    output = OutputText(TOKENIZER, ["\n\n"])
    assert output.push(ids_of("one\n\ntwo")) == TextDelta("one", 5, True)


def test_a_stop_across_blocks_is_never_partly_shown() -> None:
    output = OutputText(TOKENIZER, ["STOP"])
    assert output.push(ids_of("go ST")) == TextDelta("go ", 5, False)
    assert output.push(ids_of("OP and on")) == TextDelta("", 2, True)


def test_the_stop_that_is_complete_first_wins() -> None:
    assert OutputText(TOKENIZER, ["cde", "bc"]).push(ids_of("abcde")) == TextDelta("a", 3, True)


def test_of_stops_complete_together_the_longest_wins() -> None:
    assert OutputText(TOKENIZER, ["c", "abc"]).push(ids_of("xabc")) == TextDelta("x", 4, True)


def test_after_a_stop_nothing_is_taken() -> None:
    output = OutputText(TOKENIZER, ["."])
    output.push(ids_of("a."))
    assert output.push(ids_of("b")) == TextDelta("", 0, True)
    assert output.finish() == ""


def test_without_stops_all_tokens_are_used() -> None:
    assert OutputText(TOKENIZER).push(ids_of("hello")) == TextDelta("hello", 5, False)


def test_finish_gives_a_held_character_and_a_held_beginning_of_a_stop() -> None:
    output = OutputText(TOKENIZER, ["END"])
    assert output.push([*ids_of("the EN"), *ids_of("é")[:1]]).text == "the "
    assert output.finish() == "EN\ufffd"
    assert not output.stopped


def test_a_stop_that_only_the_end_completes_is_cut() -> None:
    output = OutputText(BYTE_FALLBACK, ["é"])
    ids = [BYTE_FALLBACK.token_to_id(token) for token in ("a", "<0xC3>", "<0xA9>")]
    assert output.push(ids) == TextDelta("a", 3, False)
    assert output.finish() == ""
    assert output.stopped


@pytest.mark.real_model
def test_stops_at_any_place_of_real_text() -> None:
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL))
    text = "def f(x):\n    return x  # naïve 👩‍👩‍👧 日本\n\nprint(f(1))"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    for start in range(len(text)):
        for length in (1, 2, 5, 12):
            stop = [text[start : start + length], "never"]
            assert run(tokenizer, stop, ids, [3, 9, 10])[::2] == by_definition(stop, text)
