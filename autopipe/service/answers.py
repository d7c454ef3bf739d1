"""Answers in OpenAI's shapes: whole objects, and the chunks of a stream."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from autopipe.service.generation import Delta
from autopipe.service.token_text import TokenTexts

LOWEST_LOGPROB = -9999.0
"""Stands for a log-probability of minus infinity, which JSON cannot write (as OpenAI's does)."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def to_dict(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(slots=True)
class FinishedChoice:
    """All deltas of a choice, joined."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason


class Shape(Protocol):
    """How one kind of answer is written."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a stream's first chunk, None where there is none."""

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of a chunk with text."""

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        """The choice of a choice's last chunk."""

    def whole(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        """The choice of an answer in one piece."""

    @property
    def kinds(self) -> tuple[str, str, str]:
        """Prefix of ids, `object` of whole answers, `object` of chunks."""


class Answer:
    """What all parts of one answer have in common.

    Args:
        model: the name the client asked for.
        fingerprint: of what computes the output.
    """

    def __init__(self, shape: Shape, model: str, fingerprint: str) -> None:
        self._shape = shape
        prefix, self._object, self._chunk_object = shape.kinds
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "object": self._object,
            "choices": [self._shape.whole(index, choice) for index, choice in enumerate(choices)],
            "usage": usage.to_dict(),
        }

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        return {
            **self._head,
            "object": self._chunk_object,
            "choices": choices,
            "usage": None if usage is None else usage.to_dict(),
        }


class ChatShape:
    kinds = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._choice(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._choice(index, {"content": delta.text}, self._logprobs(delta.logprobs), None)

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        return self._choice(index, {}, None, reason)

    def whole(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _choice(self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, rows: list[Any] | None) -> dict[str, Any] | None:
        if rows is None:
            return None
        content = []
        for row in rows:
            top = [self._token(token, logprob) for token, logprob in row["top"]]
            content.append({**self._token(row["token_id"], row["logprob"]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._texts(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": data}


class CompletionShape:
    kinds = ("cmpl", "text_completion", "text_completion")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._choice(index, delta.text, self._logprobs(index, delta.logprobs), None)

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        return self._choice(index, "", None, reason)

    def whole(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        return self._choice(index, choice.text, self._logprobs(index, choice.logprobs), choice.finish_reason)

    def _choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, rows: list[Any] | None) -> dict[str, Any] | None:
        if rows is None:
            return None
        tokens, offsets = [], []
        for row in rows:
            tokens.append(self._texts(row["token_id"])[0])
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [finite(row["logprob"]) for row in rows],
            "top_logprobs": [
                {self._texts(token)[0]: finite(logprob) for token, logprob in row["top"]} if row["top"] else None
                for row in rows
            ],
            "text_offset": offsets,
        }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
