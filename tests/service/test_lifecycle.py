"""Loading, refusing when full, clients that leave, and an orderly end."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from openai import OpenAI

from autopipe.core.errors import ModelLoadError
from autopipe.core.plan import Plan
from autopipe.core.telemetry.pipelines import running_pipelines
from autopipe.service.config import ServiceConfig
from autopipe.service.host import open_host
from autopipe.service.server import Server
from autopipe.service.service import Service
from tests.service.serving import ALIAS, Running, serving, until
from tests.service.test_refusals import send

CHAT = "/v1/completions"


def slow_plan(ms: float = 5.0) -> Plan:
    return Plan.parse({"chain": [{"model": "emulated", "name": "big", "emulated": {"ms": {1: ms}}}], "mode": "plain"})


@pytest.fixture(scope="module")
def slow(while_loading: dict[str, tuple[int, Any]]) -> Iterator[Running]:
    """A service that takes its time; what it answers before it has loaded is put into `while_loading`."""
    settings = {"max_active": 4, "limits": {"max_queue": 2}}
    go_on = threading.Event()

    def opener(plan: Plan) -> Any:
        go_on.wait(20)
        return open_host(plan, ServiceConfig.parse(settings))

    with serving(slow_plan(), wait=False, opener=opener, control_interval_s=0.1, **settings) as running:
        for path in ("/health", "/v1/models", "/v1/autopipe/plan"):
            while_loading[path] = send(running, path)
        while_loading[CHAT] = send(running, CHAT, body(1))
        go_on.set()
        until(lambda: running.service.loaded.is_set(), 240)
        yield running


@pytest.fixture(scope="module")
def while_loading() -> dict[str, tuple[int, Any]]:
    return {}


def body(tokens: int, *, stream: bool = True) -> dict[str, Any]:
    return {"model": ALIAS, "prompt": "abc", "max_tokens": tokens, "temperature": 0, "stream": stream}


def open_stream(running: Running, tokens: int, *, stream: bool = True) -> http.client.HTTPConnection:
    host, port = running.sock.getsockname()[:2]
    connection = http.client.HTTPConnection(host, port, timeout=20)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", CHAT, json.dumps(body(tokens, stream=stream)), headers)
    return connection


def idle(running: Running) -> bool:
    load = running.service.ready().load()
    return load.running == load.waiting == running.service.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(slow: Running, stream: bool) -> None:
    connection = open_stream(slow, 100_000, stream=stream)
    until(lambda: slow.service.ready().load().running == 1)
    connection.close()
    until(lambda: idle(slow), 5)


def test_a_signal_is_heeded_whatever_it_interrupts() -> None:
    config = ServiceConfig()
    service = Service(config, slow_plan(), lambda plan: open_host(plan, config))
    server = Server(service)
    with service.events._gate:  # as when the signal comes while the loop subscribes a stream
        server.handle_exit(signal.SIGTERM, None)
    assert asyncio.run(server.on_tick(1)) is True
    assert service.stopping


def test_many_clients_that_leave_leave_nothing_behind(slow: Running) -> None:
    threads = threading.active_count()
    for _ in range(5):
        connections = [open_stream(slow, 100_000) for _ in range(4)]
        until(lambda: slow.service.ready().load().running)
        for connection in connections:
            connection.close()
        until(lambda: idle(slow), 5)
    assert threading.active_count() <= threads + 8  # the pool that tokenises prompts


def test_a_full_queue_answers_429_with_retry_after(slow: Running) -> None:
    connections: list[http.client.HTTPConnection] = []
    refused = None
    for _ in range(20):
        connection = open_stream(slow, 100_000)
        connections.append(connection)
        response = connection.getresponse()
        if response.status == 429:
            refused = response
            break
    assert refused is not None
    assert int(refused.headers["Retry-After"]) >= 1
    assert json.loads(refused.read())["error"]["code"] == "queue_full"
    for connection in connections:
        connection.close()
    until(lambda: idle(slow), 5)
    assert send(slow, CHAT, body(3, stream=False))[0] == 200


def test_a_short_request_is_not_starved_by_long_ones(slow: Running) -> None:
    connections = [open_stream(slow, 100_000) for _ in range(3)]
    until(lambda: slow.service.ready().load().running == 3)
    assert send(slow, CHAT, body(5, stream=False))[0] == 200
    for connection in connections:
        connection.close()
    until(lambda: idle(slow), 5)


def test_autopipe_top_shows_it_while_it_runs(slow: Running) -> None:
    def shown() -> list[str]:
        return [view.plan for view in running_pipelines() if view.pid == os.getpid()]

    until(lambda: "plain: big" in shown())


def test_while_loading_health_is_503_and_requests_are_told_to_come_back(
    slow: Running, while_loading: dict[str, tuple[int, Any]]
) -> None:
    assert while_loading["/health"] == (503, {"status": "loading"})
    status, answer = while_loading[CHAT]
    assert (status, answer["error"]["code"]) == (503, "loading")
    assert while_loading["/v1/models"][0] == 200
    assert while_loading["/v1/autopipe/plan"][0] == 503
    assert send(slow, "/health")[0] == 200
    assert send(slow, CHAT, body(1, stream=False))[0] == 200


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def opener(plan: Plan) -> Any:
        raise ModelLoadError("no such weights")

    with serving(slow_plan(), wait=False, opener=opener) as running:
        running.thread.join(10)
        assert not running.thread.is_alive()
        assert isinstance(running.service.load_error, ModelLoadError)


@dataclass
class End:
    """What clients of a service that shut down got, by what they were doing."""

    health: tuple[int, Any]
    newcomer: tuple[int, Any]
    short: str
    long: str
    whole: dict[str, Any]
    events: bytes


@pytest.fixture(scope="module")
def end() -> End:
    with serving(slow_plan(), shutdown_timeout_s=1.0) as running:
        listening = http.client.HTTPConnection(*running.sock.getsockname()[:2], timeout=20)
        listening.request("GET", "/v1/autopipe/events")
        events = listening.getresponse()
        short, long = open_stream(running, 60), open_stream(running, 100_000)
        whole = open_stream(running, 100_000, stream=False)
        until(lambda: running.service.ready().load().running == 3)
        running.service.begin_shutdown()
        end = End(
            send(running, "/health"),
            send(running, CHAT, body(1)),
            short.getresponse().read().decode(),
            long.getresponse().read().decode(),
            json.loads(whole.getresponse().read()),
            events.read(),  # which returns: the stream of events ends too
        )
        running.thread.join(10)
        assert not running.thread.is_alive()
    return end


def test_the_end_takes_no_new_requests(end: End) -> None:
    assert end.health == (503, {"status": "stopping"})
    status, answer = end.newcomer
    assert (status, answer["error"]["code"]) == (503, "shutting_down")
    assert b"event: service" in end.events


def test_the_end_lets_requests_finish(end: End) -> None:
    assert '"finish_reason":"length"' in end.short
    assert end.short.endswith("data: [DONE]\n\n")


def test_what_outlasts_the_shutdown_is_aborted_with_a_finish_reason(end: End) -> None:
    assert end.long.count('"finish_reason":"abort"') == 1
    assert end.long.endswith("data: [DONE]\n\n")
    assert end.whole["choices"][0]["finish_reason"] == "abort"
    assert end.whole["choices"][0]["text"]


def test_an_answer_does_not_depend_on_company(client: OpenAI) -> None:
    def ask(seed: int) -> str:
        done = client.completions.create(
            model=ALIAS, prompt="The quick", max_tokens=60, seed=seed, logit_bias={"257": -100}
        )
        return done.choices[0].text

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone
