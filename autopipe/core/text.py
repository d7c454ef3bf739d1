"""The text of one request as its tokens arrive: detokenized, searched for stop strings, held back while it must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopipe.core.detokenize import make_detokenizer
from autopipe.core.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a block of tokens adds.

    Attributes:
        text: new text, final: it will not be taken back.
        num_tokens_used: tokens of the block up to and including the one that completed a stop string; all without one.
        stopped: whether a stop string was found; the text is cut before it.
    """

    text: str
    num_tokens_used: int
    stopped: bool


class OutputText:
    """Turns blocks of token ids into text deltas; joined, they are the full decode up to the first stop string.

    The result does not depend on how tokens are grouped into blocks. The first stop string in token order wins.

    Args:
        tokenizer: a Hugging Face tokenizer or a `tokenizers.Tokenizer`.
        stop: stop strings.

    Raises:
        ConfigError: an empty stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._detokenizer = make_detokenizer(tokenizer)
        self._matcher = StopMatcher(stop)
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, in `push` or in `finish`."""
        return self._stopped

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next tokens; after a stop string nothing more is taken."""
        if self._stopped:
            return TextDelta("", 0, True)
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            text, self._stopped = self._matcher.push(self._detokenizer.push(token_id))
            pieces.append(text)
            if self._stopped:
                return TextDelta("".join(pieces), index + 1, True)
        return TextDelta("".join(pieces), len(token_ids), False)

    def finish(self) -> str:
        """The text still held at the end of the output; "" after a stop string.

        A stop string may first show here, in a character that only the end of the text completes: see `stopped`.
        """
        if self._stopped:
            return ""
        text, self._stopped = self._matcher.push(self._detokenizer.finish())
        return text if self._stopped else text + self._matcher.finish()
