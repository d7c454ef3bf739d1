"""Shapes that JSON can write, and tokens as text and bytes."""

from __future__ import annotations

import json
import math

import pytest

from autopipe.service.answers import LOWEST_LOGPROB, Answer, ChatShape, CompletionShape, FinishedChoice, Usage
from autopipe.service.token_text import TokenTexts
from tests.core.tokenizers_in_code import byte_level
from tests.tiny import tiny_tokenizer

IMPOSSIBLE = {"token_id": 1, "logprob": -math.inf, "top": [[1, -math.inf], [2, -0.5]]}


@pytest.mark.parametrize("shape", [ChatShape, CompletionShape])
def test_a_probability_of_nought_is_valid_json(shape: type[ChatShape] | type[CompletionShape]) -> None:
    answer = Answer(shape(TokenTexts(tiny_tokenizer())), "m", "fp")
    choice = FinishedChoice("x", [1], [IMPOSSIBLE], "stop")
    text = json.dumps(answer.whole([choice], Usage(1, 1)), allow_nan=False)
    assert str(LOWEST_LOGPROB) in text


def test_usage_adds_up() -> None:
    assert Usage(3, 4).to_dict() == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_tokens_are_shown_as_text_and_bytes() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    (letter,) = tokenizer("A")["input_ids"]
    assert texts(letter) == ("A", [65])
    first, second = tokenizer("é")["input_ids"]
    assert texts(first) == ("bytes:\\xc3", [0xC3])
    assert texts(second) == ("bytes:\\xa9", [0xA9])
    assert texts(tokenizer.eos_token_id)[0] == "</s>"
    assert texts(10_000) == ("", [])


def test_bytes_of_tokens_join_to_the_text() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    text = "naïve 東京 🙂"
    data = bytes(byte for token in tokenizer(text)["input_ids"] for byte in texts(token)[1])
    assert data.decode() == text
