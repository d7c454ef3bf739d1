"""Server-sent events: bytes of a `text/event-stream`, and the response that carries them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still here\n\n"
KEEP_ALIVE_S = 15.0


def event(data: Any, *, name: str | None = None, number: int | None = None) -> bytes:
    """One event with JSON for data."""
    head = f"event: {name}\n" if name else ""
    head += f"id: {number}\n" if number is not None else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class EventResponse(StreamingResponse):
    """A stream of events. Its iterator is cancelled when the client goes away.

    Args:
        on_end: called when it is over, however it ended, even if it never began: an iterator that was not started
            cannot clean up after itself.
    """

    def __init__(self, events: AsyncIterable[bytes], on_end: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type=MEDIA_TYPE, headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
