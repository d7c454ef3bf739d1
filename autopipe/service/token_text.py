"""Single tokens as text and bytes, for log-probabilities."""

from __future__ import annotations

import re
from typing import Any

from autopipe.core.detokenize import ByteLevelDetokenizer, make_detokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Text and bytes of tokens, remembered once worked out.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._known: dict[int, tuple[str, list[int]]] = {}
        self._is_byte_level = isinstance(make_detokenizer(tokenizer), ByteLevelDetokenizer)

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        """The token's text, and its bytes; a token that is no whole text is written `bytes:\\xe2\\x82`."""
        if token_id not in self._known:
            data = self._bytes(token_id)
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._known[token_id] = (text, list(data))
        return self._known[token_id]

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id in self._special:
            return str(token).encode("utf-8", errors="replace")
        single = _BYTE_TOKEN.fullmatch(token)
        if single:
            return bytes([int(single[1], 16)])
        if self._is_byte_level:
            return ByteLevelDetokenizer.token_bytes(token)
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return (" " if token.startswith("▁") and not text.startswith(" ") else "").encode() + text.encode()
