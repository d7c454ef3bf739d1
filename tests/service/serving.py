"""A service over a tiny model, behind a real socket, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autopipe.core.plan import Plan
from autopipe.service.config import ServiceConfig
from autopipe.service.host import open_host
from autopipe.service.server import Server, bind
from autopipe.service.service import Service

ALIAS = "tiny"


@dataclass
class Running:
    """A service that listens. `base_url` is what OpenAI's client takes."""

    service: Service
    server: Server
    sock: socket.socket
    thread: threading.Thread

    @property
    def key(self) -> str:
        """What clients must send."""
        return self.service.config.api_key or "none"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.sock.getsockname()[1]}"

    @property
    def base_url(self) -> str:
        return self.url + "/v1"


@contextlib.contextmanager
def serving(plan: Plan, *, wait: bool = True, opener: Any = None, **options: Any) -> Iterator[Running]:
    """Serve `plan` with a configuration made of `options`."""
    config = ServiceConfig.parse({"served_model_name": ALIAS, "port": 0, "shutdown_timeout_s": 5.0, **options})
    sock = bind(config)
    service = Service(config, plan, opener or (lambda wanted: open_host(wanted, config)))
    server = Server(service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    copy = sock.dup()  # the server closes its own
    service.start()
    thread.start()
    try:
        if wait:
            assert service.loaded.wait(240)
            assert service.load_error is None, service.load_error
        until(lambda: server.started)
        yield Running(service, server, copy, thread)
    finally:
        service.begin_shutdown()
        thread.join(20)
        service.close()
        copy.close()
        assert not thread.is_alive()


def until(condition: Any, timeout_s: float = 20.0) -> None:
    """Wait for something to come true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not true after {timeout_s:g} s")
        time.sleep(0.01)


def tiny_plan(folder: Any, **changes: Any) -> Plan:
    """The tiny target behind an n-gram drafter."""
    chain = [{"model": "ngram", "ngram": {"gate": False}}, {"model": str(folder), "name": "target"}]
    return Plan.parse({"chain": chain, "mode": "lockstep", **changes})
