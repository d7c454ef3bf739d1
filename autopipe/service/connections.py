"""Connections of the HTTP server: how many there may be, and how long a client may take to say what it wants."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from autopipe.service.config import Limits
from autopipe.service.errors import INVALID, SERVER, ApiError
from autopipe.service.guard import Receive, Scope, Send, send_error

_REFUSED_AT_ONCE = 64
"""So many connections beyond the most are told why they are refused; those beyond are cut without a word."""


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a time limit for a request's head, a bound on connections, and errors in OpenAI's shape.

    uvicorn has neither for a client that connects and says nothing (or one byte a minute), which would hold a file
    descriptor for ever.

    Args:
        limits: max_connections and head_timeout_s are used.
    """

    def __init__(self, *args: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = len(self.connections) - self._limits.max_connections
        if excess > _REFUSED_AT_ONCE:
            transport.abort()
            return
        if excess > 0:
            self.app = partial(_refuse, self._limits.max_connections)
        self._time_the_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timing()
        elif self._patience is None:
            self._time_the_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timing()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn answers to bytes that are no HTTP."""
        self._answer(ApiError(400, msg.rstrip("."), code="invalid_http"))

    def _time_the_head(self) -> None:
        self._patience = self.loop.call_later(self._limits.head_timeout_s, self._lose_patience)

    def _stop_timing(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        self._patience = None
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self._answer(ApiError(408, "the request did not arrive in time", kind=INVALID, code="head_timeout"))

    def _answer(self, error: ApiError) -> None:
        """Write an answer to what is no request, and close."""
        body = json.dumps(error.body()).encode()
        headers = [
            ("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close"),
        ]  # fmt: skip
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = h11.Response(status_code=error.status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


async def _refuse(most: int, scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a connection too many."""
    error = ApiError(
        503, f"more than {most} connections are open; try again in a moment", kind=SERVER, code="too_many_connections",
        headers={"Retry-After": "1"},
    )  # fmt: skip
    await send_error(error, send)
