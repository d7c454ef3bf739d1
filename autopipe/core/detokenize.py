"""Token ids to text, one token at a time: joined pieces equal the full decode, and cost O(1) per token.

Full decode means `tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)`.

Two kinds of decoders need care at the borders of tokens:

* byte-level (GPT-2, Llama 3, Qwen, SmolLM): a token is a string of bytes, and a character may span tokens. An
  incremental UTF-8 decoder over the bytes gives exactly the full decode.
* all others (SentencePiece's, WordPiece, ...): what a token decodes to depends on its neighbours (a leading space is
  stripped at the start of the text; a run of byte tokens is valid UTF-8 only as a whole). New tokens are decoded
  behind a few tokens of context, and a run of byte tokens is held until it ends.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_CONTEXT = 16
"""Tokens of context behind which new ones are decoded; more than any decoder looks back."""


class Detokenizer(Protocol):
    """Text of a growing sequence of tokens."""

    def push(self, token_id: int) -> str:
        """The text that the token completes; "" while it only begins a character."""
        ...

    def finish(self) -> str:
        """The text still held; an incomplete character becomes U+FFFD, as in a full decode."""
        ...


def make_detokenizer(tokenizer: Any) -> Detokenizer:
    """A detokenizer for a Hugging Face tokenizer (fast or slow) or a `tokenizers.Tokenizer`."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "id_to_token"):
        special = frozenset(tokenizer.all_special_ids)
        return WindowedDetokenizer(lambda ids: _decode_slow(tokenizer, ids), special.__contains__, lambda _: False)
    special = frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
    kinds = _decoder_kinds(backend.decoder)
    if kinds == ["ByteLevel"]:
        return ByteLevelDetokenizer(backend.id_to_token, special)
    has_byte_tokens = "ByteFallback" in kinds

    def is_byte(token_id: int) -> bool:
        return has_byte_tokens and _BYTE_TOKEN.fullmatch(backend.id_to_token(token_id)) is not None

    def is_skipped(token_id: int) -> bool:
        return token_id in special or backend.id_to_token(token_id) is None

    return WindowedDetokenizer(lambda ids: str(backend.decode(ids, skip_special_tokens=True)), is_skipped, is_byte)


class ByteLevelDetokenizer:
    """For decoders that map each character of a token to one byte (GPT-2's alphabet).

    Args:
        id_to_token: token id -> its string, None outside the vocabulary.
        special: ids without text.
    """

    def __init__(self, id_to_token: Callable[[int], str | None], special: frozenset[int]) -> None:
        self._id_to_token = id_to_token
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token = None if token_id in self._special else self._id_to_token(token_id)
        return "" if token is None else self._utf8.decode(self.token_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    @staticmethod
    def token_bytes(token: str) -> bytes:
        """The bytes that a token's string stands for."""
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:  # an added token in plain text
            return token.encode("utf-8", errors="replace")


class WindowedDetokenizer:
    """For any decoder: decodes new tokens behind a window of old ones and gives the difference.

    Args:
        decode: tokens -> text.
        is_skipped: whether a token has no text (special, or outside the vocabulary).
        is_byte: whether a token is one byte of a run that is decoded as a whole.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], is_skipped: Callable[[int], bool], is_byte: Callable[[int], bool]
    ) -> None:
        self._decode = decode
        self._is_skipped = is_skipped
        self._is_byte = is_byte
        self._window: list[int] = []
        self._given = ""  # the part of the window's text that has been given out

    def push(self, token_id: int) -> str:
        if self._is_skipped(token_id):
            return ""
        self._window.append(token_id)
        if self._is_byte(token_id):
            return ""
        text = self._decode(self._window)
        # An unfinished character of at most 3 bytes shows as at most 3 replacement characters.
        num_held = min(len(text) - len(text.rstrip("\ufffd")), 3)
        new = self._give(text[: len(text) - num_held])
        if len(self._window) > 2 * _MAX_CONTEXT and not num_held:
            self._window = self._window[-_MAX_CONTEXT:]
            self._given = self._decode(self._window)
        return new

    def finish(self) -> str:
        return self._give(self._decode(self._window)) if self._window else ""

    def _give(self, text: str) -> str:
        if not text.startswith(self._given):
            logger.warning("this tokenizer's decoder changes text it has already given; streamed text may differ")
        new, self._given = text[len(self._given) :], text
        return new


def _decode_slow(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _decoder_kinds(decoder: Any) -> list[str]:
    """Type names of a tokenizers decoder, a sequence flattened; empty for none."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 for itself, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
