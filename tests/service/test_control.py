"""Plans while the service runs: pinned, released, put to sleep; workers that die."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import APIError, OpenAI

from autopipe.core.plan import Plan
from autopipe.service.config import ServiceConfig
from autopipe.service.control import Control
from autopipe.service.events import EventHub
from autopipe.service.host import Load
from autopipe.service.metrics import Metrics
from autopipe.service.pulse import Pulse
from autopipe.service.status import empty_status
from autopipe.service.totals import StageTotals
from tests.service.serving import ALIAS, Running, serving, until
from tests.service.test_refusals import send

PLAN = "/v1/autopipe/plan"


def chain(**target: Any) -> Plan:
    """An n-gram, an emulated drafter and an emulated target."""
    stage: dict[str, Any] = {"model": "emulated"}
    small = {**stage, "name": "small", "window": 4, "emulated": {"ms": {1: 0.5}, "agreement": 0.8}}
    big = {**stage, "name": "big", "emulated": {"ms": {1: 3}, **target}}
    return Plan.parse({"chain": [{"model": "ngram"}, small, big], "mode": "lockstep"})


@pytest.fixture(scope="module")
def neural() -> Iterator[Running]:
    with serving(chain(), control_interval_s=0.1, sharing=False) as running:
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def complete(running: Running, tokens: int = 40, prompt: str = "abc") -> str:
    with OpenAI(base_url=running.base_url, api_key="none", max_retries=0, timeout=30) as client:
        done = client.completions.create(model=ALIAS, prompt=prompt, max_tokens=tokens, temperature=0)
        return done.choices[0].text


def workers(running: Running) -> set[str]:
    return set(running.service.ready().worker_ids())


def test_the_plan_is_shown_by_names_without_paths(neural: Running) -> None:
    status, plan = send(neural, PLAN)
    assert status == 200
    assert plan["mode"] == "lockstep"
    assert [drafter["stage"] for drafter in plan["drafters"]] == ["ngram", "small"]
    assert plan["target"] == "big"
    assert plan["pinned"] is False


def test_a_pin_holds_until_released_and_changes_no_output(neural: Running) -> None:
    expected = complete(neural)
    pin = {"pinned": True, "plan": {"mode": "async", "drafters": [{"stage": "small", "window": 2}]}}
    status, plan = send(neural, PLAN, pin, method="PUT")
    assert (status, plan["pinned"], plan["description"]) == (200, True, "small(2) > big, async")
    assert complete(neural) == expected
    status, plan = send(neural, PLAN, {"pinned": True, "plan": {"mode": "plain"}}, method="PUT")
    assert plan["description"] == "big alone"
    assert complete(neural) == expected
    status, plan = send(neural, PLAN, {"pinned": False}, method="PUT")
    assert (status, plan["pinned"], plan["description"]) == (200, False, "ngram(4) > small(4) > big, lockstep")
    assert complete(neural) == expected


def test_the_plan_in_force_can_be_pinned_as_it_is(neural: Running) -> None:
    before = send(neural, PLAN)[1]["description"]
    assert send(neural, PLAN, {"pinned": True}, method="PUT")[1]["description"] == before
    assert send(neural, PLAN, {"pinned": False}, method="PUT")[1]["pinned"] is False


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"pinned": True, "plan": {"drafters": [{"stage": "/etc/passwd"}]}}, "plan.drafters.0.stage"),
        ({"pinned": True, "plan": {"drafters": [{"stage": "big"}]}}, "plan.drafters.0.stage"),
        ({"pinned": True, "plan": {"drafters": [{"stage": "small"}, {"stage": "ngram"}]}}, "plan.chain.1.model"),
        ({"pinned": True, "plan": {"drafters": [{"stage": "small"}, {"stage": "small"}]}}, "plan.chain"),
        ({"pinned": True, "plan": {"drafters": [{"stage": "small", "window": 0}]}}, "plan.drafters.0.window"),
        ({"pinned": True, "plan": {"mode": "sideways"}}, "plan.mode"),
        ({"pinned": True, "plan": {"chain": []}}, "plan.chain"),
        ({"pinned": False, "plan": {}}, "plan"),
        ({}, "pinned"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_and_the_old_one_stays(neural: Running, body: Any, param: str) -> None:
    before = send(neural, PLAN)[1]
    status, answer = send(neural, PLAN, body, method="PUT")
    assert (status, answer["error"]["param"]) == (400, param)
    assert send(neural, PLAN)[1]["description"] == before["description"]


def test_changes_come_on_the_event_stream_with_acceptance(neural: Running) -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    response = urllib.request.urlopen(neural.url + "/v1/autopipe/events", timeout=20)

    def listen() -> None:
        name = ""
        for line in response:
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                heard.append((name, json.loads(line[6:])))
                judged = name == "acceptance" and heard[-1][1]["stages"].get("small", {}).get("proposed")
                if judged and "plan" in {kind for kind, _ in heard}:  # the first interval may have no draft yet
                    return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    send(neural, PLAN, {"pinned": True, "plan": {"drafters": [{"stage": "small", "window": 3}]}}, method="PUT")
    complete(neural, 200)
    listener.join(20)
    response.close()
    send(neural, PLAN, {"pinned": False}, method="PUT")
    events = dict(heard)
    assert (events["plan"]["source"], events["plan"]["new"]) == ("pin", "small(3) > big, lockstep")
    assert "old" in events["plan"]
    assert events["acceptance"]["stages"]["small"]["proposed"] > 0


@pytest.mark.parametrize("stage", ["small", "big"])
def test_a_worker_that_is_killed_comes_back_and_the_text_is_the_same(neural: Running, stage: str) -> None:
    expected = complete(neural)
    host = neural.service.ready()
    process, context = host.worker_ids()[stage], host.context_tokens
    os.kill(process, signal.SIGKILL)
    until(lambda: host.worker_ids().get(stage) not in (None, process))
    assert host.context_tokens == context
    until(lambda: send(neural, "/health")[0] == 200)
    assert complete(neural) == expected
    until(lambda: {"stage": stage, "what": "died"}.items() <= _last_worker_event(neural, stage).items())


def _last_worker_event(running: Running, stage: str) -> dict[str, Any]:
    events = [event.data for event in running.service.events.recent() if event.kind == "worker"]
    return next((event for event in reversed(events) if event["stage"] == stage and event["what"] == "died"), {})


def test_a_target_that_dies_fails_what_runs_with_a_typed_error_and_what_waits_gets_its_turn(
    neural: Running, pool: ThreadPoolExecutor
) -> None:
    errors: list[Any] = []

    def ask() -> None:
        try:
            complete(neural, 2000)
        except APIError as error:
            errors.append(error)

    expected = complete(neural, 10, "waiting")
    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: neural.service.ready().load().running)
    waiting = [pool.submit(complete, neural, 10, "waiting") for _ in range(3)]
    until(lambda: neural.service.ready().load().waiting == 3)
    os.kill(neural.service.ready().worker_ids()["big"], signal.SIGKILL)
    asking.join(20)
    assert [error.code for error in errors] == ["target_died"]
    assert [error.status_code for error in errors] == [503]
    assert [future.result(20) for future in waiting] == [expected] * 3
    assert complete(neural)


def fall_asleep(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the service be idle until its drafters are unloaded."""
    until(lambda: workers(running) == {"small", "big"})
    soon = running.service.config.model_copy(update={"idle_unload_s": 0.3})
    with monkeypatch.context() as patch:
        patch.setattr(running.service.control, "_config", soon)
        until(lambda: workers(running) == {"big"})


def test_long_idle_unloads_drafters_and_the_first_request_brings_them_back(
    neural: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = complete(neural)
    fall_asleep(neural, monkeypatch)
    assert send(neural, PLAN)[1]["asleep"] is True
    assert complete(neural) == expected
    until(lambda: workers(neural) == {"small", "big"})
    until(lambda: "request" in [event.data.get("source") for event in neural.service.events.recent()])
    assert send(neural, PLAN)[1]["description"] == "ngram(4) > small(4) > big, lockstep"


class Still:
    """A host and its engine without processes, and a policy that does nothing; remembers what it is told."""

    def __init__(self) -> None:
        self.plan = chain()
        self.engine = self
        self.kept: list[Plan] = []
        self.paused = False

    def apply(self, plan: Plan) -> None:
        self.plan = plan

    def keep_loaded(self, plans: list[Plan]) -> None:
        self.kept = plans

    def worker_ids(self) -> dict[str, int]:
        return dict.fromkeys(self.plan.names(), 1)

    def load(self) -> Load:
        return Load()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def stop(self) -> None:
        pass


def test_after_a_pause_a_policy_finds_all_drafters_loaded() -> None:
    still: Any = Still()
    home = still.plan
    config = ServiceConfig(policy="rules", idle_unload_s=0.001)
    totals = StageTotals()
    control = Control(config, still, Pulse(), totals, EventHub(1), Metrics("m", empty_status, totals.finished))
    control._policy = still
    time.sleep(0.01)
    control._sleep_if_idle()
    until(lambda: still.plan.names() == ["big"])
    assert still.paused
    assert still.kept == []
    control.note_request()
    until(lambda: not still.paused)
    assert still.plan == home
    assert still.kept == [home]
    control.stop()


def test_a_watch_between_waking_and_the_return_of_the_drafters_leaves_that_to_the_request() -> None:
    still: Any = Still()
    config = ServiceConfig(policy="static", idle_unload_s=0.001)
    totals, events = StageTotals(), EventHub(10)
    control = Control(config, still, Pulse(), totals, events, Metrics("m", empty_status, totals.finished))
    time.sleep(0.01)
    control._sleep_if_idle()
    until(lambda: control._under_way.done())
    watch = threading.Thread(target=control._watch)

    def keep_loaded(plans: list[Plan]) -> None:
        watch.start()  # the request is awake, and has not yet asked for the drafters
        watch.join(0.2)

    still.keep_loaded = keep_loaded
    control.note_request()
    watch.join()
    until(lambda: len(still.plan.names()) > 1)
    control.stop()
    until(lambda: [event.data["source"] for event in events.recent()] == ["idle", "request"])
