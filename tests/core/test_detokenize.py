"""Joined pieces equal the full decode, for any tokens of any decoder family."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from autopipe.core import detokenize
from autopipe.core.detokenize import ByteLevelDetokenizer, WindowedDetokenizer, make_detokenizer
from autopipe.core.models import DEFAULT_MODEL, load_tokenizer, resolve
from tests.core.tokenizers_in_code import FAMILIES, byte_fallback, byte_level, full_decode, word_piece

TOKENIZERS = {name: build() for name, build in FAMILIES.items()}
HARD_TEXTS = [
    "plain English, with \t tabs\nand    spaces  ",
    "日本語と한국어와中文",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "e\u0301 z\u0335\u0321\u030a combining",
    "हिन्दी ไทย العربية עברית አማርኛ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0001f9ff\U0010fffd",
    "",
]


def size(tokenizer: Any) -> int:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return int(backend.get_vocab_size())


def streamed(tokenizer: Any, ids: list[int]) -> list[str]:
    detokenizer = make_detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return load_tokenizer(resolve(DEFAULT_MODEL))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_tokens_add_up_to_the_full_decode(name: str) -> None:
    tokenizer = TOKENIZERS[name]

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.integers(0, size(tokenizer) + 3), max_size=120))
    def check(ids: list[int]) -> None:
        assert "".join(streamed(tokenizer, ids)) == full_decode(tokenizer, ids)

    check()


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back_from_bytes(text: str) -> None:
    pieces = streamed(TOKENIZERS["byte_level"], encoded(TOKENIZERS["byte_level"], text))
    assert "".join(pieces) == full_decode(TOKENIZERS["byte_level"], encoded(TOKENIZERS["byte_level"], text))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.integers(3, 258), st.integers(259, 274)), max_size=80))
def test_runs_of_bytes_between_pieces_add_up(ids: list[int]) -> None:
    assert "".join(streamed(TOKENIZERS["byte_fallback"], ids)) == full_decode(TOKENIZERS["byte_fallback"], ids)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_a_character_split_over_tokens_is_never_shown_broken(text: str) -> None:
    pieces = streamed(TOKENIZERS["byte_level"], encoded(TOKENIZERS["byte_level"], text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_shown_with_its_last_byte() -> None:
    assert streamed(TOKENIZERS["byte_level"], encoded(TOKENIZERS["byte_level"], "é!")) == ["", "é", "!", ""]


def test_a_character_that_never_completes_is_one_replacement_at_the_end() -> None:
    assert streamed(TOKENIZERS["byte_level"], encoded(TOKENIZERS["byte_level"], "a🙂")[:-1])[-1] == "\ufffd"


def test_special_tokens_have_no_text_even_inside_a_character() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    first, second = encoded(tokenizer, "é")
    assert streamed(tokenizer, [first, tokenizer.eos_token_id, second]) == ["", "", "é", ""]


def test_byte_level_tokenizers_take_the_path_without_decoding() -> None:
    assert isinstance(make_detokenizer(byte_level()), ByteLevelDetokenizer)
    assert isinstance(make_detokenizer(byte_fallback()), WindowedDetokenizer)


def test_a_run_of_bytes_is_held_until_it_is_known_to_be_valid() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [tokenizer.token_to_id(token) for token in ("a", "<0xE3>", "<0x81>", "<0x82>", "b")]
    assert streamed(tokenizer, ids) == ["a", "", "", "", "あb", ""]


def test_long_texts_are_decoded_in_a_window() -> None:
    longest = 0
    tokenizer = TOKENIZERS["word_piece"]

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return str(tokenizer.decode(ids))

    detokenizer = WindowedDetokenizer(decode, lambda _: False, lambda _: False)
    ids = [1, 2, 3] * 300
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == tokenizer.decode(ids)
    assert longest < 50


def test_a_tokenizer_without_a_fast_backend_streams_too() -> None:
    class Slow:
        all_special_ids = (0,)

        def decode(self, ids: list[int], **options: Any) -> str:
            assert options == {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
            return bytes(ids).decode("utf-8", errors="replace")

    assert streamed(Slow(), [0, *"é!".encode()]) == ["", "", "é", "!", ""]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0x61, 0xC3, 0xA9, 0xFF, 0xE3, 0x81, 0x82, 0xF0, 0x9F, 0x99]), max_size=80))
def test_broken_bytes_of_an_unknown_decoder_add_up(data: list[int]) -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    detokenizer = WindowedDetokenizer(decode, lambda _: False, lambda _: False)
    assert "".join(map(detokenizer.push, data)) + detokenizer.finish() == decode(data)


def test_a_decoder_that_takes_text_back_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    detokenizer = WindowedDetokenizer(lambda ids: str(len(ids)), lambda _: False, lambda _: False)
    detokenizer.push(1)
    detokenizer.push(1)
    assert "streamed text may differ" in caplog.text


def test_the_byte_alphabet_is_gpt2s() -> None:
    from tokenizers import pre_tokenizers

    assert set(detokenize._BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(detokenize._BYTE_OF.values()) == list(range(256))


def test_a_tokenizer_without_decoder_streams() -> None:
    tokenizer: Tokenizer = word_piece()
    tokenizer.decoder = None
    assert "".join(streamed(tokenizer, [1, 2, 0, 3])) == full_decode(tokenizer, [1, 2, 0, 3])


@pytest.mark.real_model
def test_the_default_models_tokens_add_up(smollm2: Any) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(0, 49_155), max_size=80))
    def check(ids: list[int]) -> None:
        assert "".join(streamed(smollm2, ids)) == full_decode(smollm2, ids)

    check()


@pytest.mark.real_model
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_the_default_models_text_is_never_broken(text: str, smollm2: Any) -> None:
    pieces = streamed(smollm2, encoded(smollm2, text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
