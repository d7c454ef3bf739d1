"""Runs the service: sockets, signals, an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
import time
from functools import partial
from types import FrameType

import uvicorn

from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.service.app import create_app
from autopipe.service.config import ServiceConfig
from autopipe.service.connections import BoundedProtocol
from autopipe.service.service import Service

_log = logging.getLogger("autopipe.service")

_POLL_S = 0.05
_MAX_HEAD_BYTES = 64 * 1024
_FLUSH_S = 5.0
"""How long aborted requests may take to tell their clients."""


class Server(uvicorn.Server):
    """A uvicorn server whose first SIGTERM or SIGINT drains, and whose second ends at once."""

    def __init__(self, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                access_log=False,
                lifespan="off",
                http=partial(BoundedProtocol, limits=service.config.limits),  # type: ignore[arg-type]
                ws="none",
                proxy_headers=False,
                timeout_graceful_shutdown=int(_FLUSH_S),
                timeout_keep_alive=service.config.keep_alive_s,
                server_header=False,
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            )
        )
        self._service = service
        self._drain: asyncio.Task[None] | None = None
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first begins the orderly end, another cuts it short.

        It interrupts the loop anywhere, also where that holds a lock: the loop's next tick does the rest.
        """
        self._signals += 1

    async def main_loop(self) -> None:
        """Serve until told to stop; then let requests end, and abort those that do not."""
        await super().main_loop()
        await self._finish()

    async def on_tick(self, counter: int) -> bool:
        if self._signals and not self._service.stopping:
            _log.info("no new requests; those under way may go on for %g s", self._service.config.shutdown_timeout_s)
            self._service.begin_shutdown()
        if self._service.load_error is not None:
            return True
        return await super().on_tick(counter) or self._service.stopping

    async def _finish(self) -> None:
        self._service.begin_shutdown()
        deadline_s = time.monotonic() + self._service.config.shutdown_timeout_s
        while self._service.num_open and time.monotonic() < deadline_s and self._signals < 2:
            await asyncio.sleep(_POLL_S)
        if self._service.num_open:
            _log.warning("%d requests are aborted", self._service.abort_all())
        deadline_s = time.monotonic() + _FLUSH_S
        while self._service.num_open and time.monotonic() < deadline_s and self._signals < 3:
            await asyncio.sleep(_POLL_S)
        self.should_exit = True


def bind(config: ServiceConfig) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address does not exist here, or is taken.
    """
    host = config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, config.port))
    except (OSError, UnicodeError) as error:
        sock.close()
        key = "port" if getattr(error, "errno", None) in (errno.EACCES, errno.EADDRINUSE) else "host"
        value = config.port if key == "port" else config.host
        raise ConfigError(key, value, f"an address of this machine that is free ({error})") from None
    return sock


def run(service: Service, sock: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then end in order.

    Raises:
        AutoPipeError: the models could not be loaded.
    """
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {service.config.served_model_name} on http://{shown}:{port} (models are loading)", file=sys.stderr)
    service.start()
    try:
        Server(service).run(sockets=[sock])
    finally:
        service.close()
    error = service.load_error
    if isinstance(error, AutoPipeError):
        raise error
    if error is not None:
        raise AutoPipeError(f"the models could not be loaded: {error}") from error
