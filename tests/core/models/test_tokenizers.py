"""Tokenizers of one chain must agree."""

from __future__ import annotations

import pytest

from autopipe.core.errors import TokenizerMismatchError
from autopipe.core.models import require_same_tokenizer
from tests.tiny import tiny_tokenizer


def test_equal_vocabularies_pass() -> None:
    require_same_tokenizer(tiny_tokenizer(), tiny_tokenizer())


def test_another_chat_template_or_eos_does_not_matter() -> None:
    drafter = tiny_tokenizer()
    drafter.chat_template = None
    drafter.eos_token = "<pad>"
    require_same_tokenizer(tiny_tokenizer(), drafter)


def test_a_difference_names_both_and_shows_the_first_tokens() -> None:
    drafter = tiny_tokenizer(extra_tokens=("<a>", "<b>", "<c>", "<d>"))
    with pytest.raises(TokenizerMismatchError) as caught:
        require_same_tokenizer(tiny_tokenizer(), drafter, "big", "small")
    message = str(caught.value)
    assert "'big' (target, 259 tokens)" in message
    assert "'small' (drafter, 263 tokens)" in message
    assert "4 ids: id 259 is missing and '<a>'; id 260 is missing and '<b>'; id 261" in message
    assert "<d>" not in message


def test_the_same_tokens_in_another_order_differ() -> None:
    target, drafter = tiny_tokenizer(extra_tokens=("<a>", "<b>")), tiny_tokenizer(extra_tokens=("<b>", "<a>"))
    with pytest.raises(TokenizerMismatchError, match="id 259 is '<a>' and '<b>'"):
        require_same_tokenizer(target, drafter)
