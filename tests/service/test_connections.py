"""Clients that connect and say too little, too slowly, or nothing that is HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from autopipe.core.errors import ModelLoadError
from autopipe.core.plan import Plan
from tests.service.serving import Running, serving, until
from tests.service.test_lifecycle import slow_plan
from tests.service.test_refusals import send

HEAD = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    """A server whose models never load: what is tested here comes before them."""
    limits = {"max_connections": 4, "head_timeout_s": 0.3, "body_timeout_s": 0.3}
    end = threading.Event()

    def opener(plan: Plan) -> Any:
        end.wait(60)
        raise ModelLoadError("never")

    with serving(slow_plan(), wait=False, opener=opener, keep_alive_s=1, limits=limits) as running:
        yield running
        end.set()


def connect(running: Running) -> socket.socket:
    connection = socket.create_connection(running.sock.getsockname()[:2], timeout=10)
    until(lambda: num_open(running) > 0)
    return connection


def num_open(running: Running) -> int:
    return len(running.server.server_state.connections)


def answer(connection: socket.socket) -> tuple[int, Any]:
    """Status and JSON body of what the server says before it closes."""
    with connection:
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_who_says_nothing_is_not_waited_for(strict: Running) -> None:
    status, body = answer(connect(strict))
    assert (status, body["error"]["code"]) == (408, "head_timeout")


def test_a_head_that_trickles_is_not_waited_for(strict: Running) -> None:
    connection = connect(strict)
    until(lambda: not _trickle(connection))
    until(lambda: num_open(strict) == 0)


def _trickle(connection: socket.socket) -> bool:
    """Send a byte of a header that never ends; whether the server still takes it."""
    try:
        connection.sendall(b"x")
        time.sleep(0.02)
    except OSError:
        return False
    return True


def test_a_second_head_on_the_same_connection_has_its_time_limit_too(strict: Running) -> None:
    connection = connect(strict)
    connection.sendall(HEAD + b"\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.sendall(HEAD)
    status, body = answer(connection)
    assert (status, body["error"]["code"]) == (408, "head_timeout")


def test_a_body_that_does_not_come_is_not_waited_for(strict: Running) -> None:
    connection = connect(strict)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
    status, body = answer(connection)
    assert (status, body["error"]["code"]) == (408, "body_timeout")


def test_an_answer_may_take_longer_than_a_head(strict: Running) -> None:
    with connect(strict) as connection:
        connection.sendall(b"GET /v1/autopipe/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        time.sleep(0.5)
        strict.service.events.publish("service", {"still": "open"})
        until(lambda: b"still" in connection.recv(65536))


def test_connections_beyond_the_most_are_refused_until_others_close(strict: Running) -> None:
    until(lambda: num_open(strict) == 0)
    held = [connect(strict) for _ in range(4)]
    for connection in held:
        connection.sendall(HEAD + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    late = connect(strict)
    late.sendall(HEAD + b"\r\n")
    status, body = answer(late)
    assert (status, body["error"]["code"]) == (503, "too_many_connections")
    for connection in held:
        connection.close()
    until(lambda: num_open(strict) == 0)
    assert send(strict, "/health")[0] == 503


@pytest.mark.parametrize("data", [b"\x16\x03\x01 TLS\r\n\r\n", b"GET /\r\n\r\n", HEAD + b"X: " + b"x" * 70_000])
def test_what_is_no_http_is_answered_in_the_same_shape(strict: Running, data: bytes) -> None:
    connection = connect(strict)
    connection.sendall(data)
    status, body = answer(connection)
    assert (status, body["error"]["code"]) == (400, "invalid_http")
    assert set(body["error"]) == {"message", "type", "param", "code"}
