"""What stands before every route: the host's name, the API key, the size of bodies. Plain ASGI, so nothing buffers.

The key is checked on the very path that the router will look at (`scope["path"]`), before a byte of the body is
read, and for unknown paths too: without it, only `/` and `/health` say anything.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from autopipe.service.config import ServiceConfig
from autopipe.service.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/", "/health"})
_DISCARDED_BYTES = 16 << 20
"""Read and forgotten of a body that is too large: a client that is still sending does not hear an answer."""
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]", "::1", ""})


class Guard:
    """An ASGI application around another.

    A service that asks for no key answers only requests whose Host is this machine (or the address it was bound to):
    a web page cannot reach it through a name of its own (DNS rebinding). Nor does it answer what a browser sends on
    behalf of another site's page, which could not read the answer but would keep the pipeline busy.
    """

    def __init__(self, app: App, config: ServiceConfig) -> None:
        self._app = app
        self._key = None if config.api_key is None else config.api_key.encode()
        self._checks_host = config.is_local and config.api_key is None
        self._hosts = _LOCAL_HOSTS | {config.host.lower()}
        self._limits = config.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, value)
        error = self._refuse(scope["path"], headers)
        if error is None and scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
            try:
                receive = await self._read_body(headers, receive)
            except ApiError as caught:
                error = caught
        if error is not None:
            await send_error(error, send)
            return
        await self._app(scope, receive, send)

    def _refuse(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._checks_host and _host_of(headers.get(b"host", b"")) not in self._hosts:
            return ApiError(403, "this service answers to the name of its own machine only", code="wrong_host")
        if self._checks_host and path not in OPEN_PATHS and headers.get(b"sec-fetch-site") == b"cross-site":
            return ApiError(403, "pages of other sites may not use this service", code="cross_site")
        if self._key is None or path in OPEN_PATHS:
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key):
            return None
        return ApiError(
            401,
            "a valid API key is needed: Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Read the body within its bounds; what the application receives gives it back whole."""
        limit = self._limits.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > limit + _DISCARDED_BYTES:
            raise _too_large(limit)
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        return _replay([message], receive)
                    size += len(message.get("body", b""))
                    if size <= limit:
                        parts.append(message.get("body", b""))
                    elif size > limit + _DISCARDED_BYTES:
                        break
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, "the request's body did not arrive in time", code="body_timeout") from None
        if size > limit:
            raise _too_large(limit)
        return _replay([{"type": "http.request", "body": b"".join(parts), "more_body": False}], receive)


async def send_error(error: ApiError, send: Send) -> None:
    """Answer with an error."""
    body = json.dumps(error.body()).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **error.headers,
    }
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _replay(messages: list[MutableMapping[str, Any]], receive: Receive) -> Receive:
    async def replaying() -> MutableMapping[str, Any]:
        return messages.pop(0) if messages else await receive()

    return replaying


def _host_of(header: bytes) -> str:
    """The host of a Host header, without the port."""
    text = header.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text.partition("]")[0] + "]"
    return text.partition(":")[0]


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
