"""From messages and prompts to token ids, with one BOS whatever template and tokenizer do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from autopipe.core.errors import ConfigError
from autopipe.service.errors import invalid
from autopipe.service.schemas import ChatMessage


class Encoder(Protocol):
    """What turns prompts into ids: an `AutoPipe`."""

    tokenizer: Any

    def encode(
        self, prompt: str | None = None, *, messages: Sequence[dict[str, Any]] | None = None, input_ids: Any = None
    ) -> list[int]: ...


def chat_ids(pipe: Encoder, messages: Sequence[ChatMessage]) -> list[int]:
    """Token ids of a chat, up to where the assistant's answer begins.

    Raises:
        ApiError: the chat template refuses the messages, or there is none.
    """
    try:
        ids = pipe.encode(messages=[_plain(message) for message in messages])
    except ConfigError as error:
        raise invalid("messages", f"messages: {error.allowed}") from None
    except Exception as error:  # a template may raise anything, and does so to refuse what it does not support
        raise invalid("messages", f"the model's chat template refuses these messages: {error}"[:500]) from None
    return one_bos(ids, pipe.tokenizer)


def completion_ids(pipe: Encoder, prompt: Any) -> list[list[int]]:
    """Token ids of each prompt of a completion request; ids are taken as they are.

    Raises:
        ApiError: text that no tokenizer takes, or an empty prompt.
    """
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    else:
        prompts = [prompt] if isinstance(prompt[0], int) else list(prompt)
    rows = []
    for number, item in enumerate(prompts):
        try:
            row = one_bos(pipe.encode(item), pipe.tokenizer) if isinstance(item, str) else list(item)
        except ConfigError as error:
            raise invalid("prompt", f"prompt: {error.allowed}") from None
        if not row:
            raise invalid("prompt", f"prompt: at least one token, but prompt {number} (from 0) is empty")
        rows.append(row)
    return rows


def one_bos(ids: list[int], tokenizer: Any) -> list[int]:
    """`ids` with exactly one BOS in front if the tokenizer puts one before plain text, and never with two."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return ids
    start = 0
    while start < len(ids) and ids[start] == bos:
        start += 1
    if start == 0:
        return [bos, *ids] if adds_bos(tokenizer) else ids
    return ids[start - 1 :]


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts BOS before plain text by itself."""
    return list(tokenizer("a")["input_ids"])[:1] == [tokenizer.bos_token_id]


def _plain(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": text, **({"name": message.name} if message.name else {})}
