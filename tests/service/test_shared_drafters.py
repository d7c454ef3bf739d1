"""A service whose requests share a target and its neural drafters: the plan changes, drafters come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from autopipe.core.plan import Plan
from tests.service.serving import Running, serving, until
from tests.service.test_control import PLAN, chain, complete, fall_asleep, workers
from tests.service.test_refusals import send

HOME = "ngram(4) > small(4) > big, lockstep"


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with serving(chain(), control_interval_s=0.1) as running:
        yield running


def together(running: Running, count: int = 8) -> list[str]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda n: complete(running, 30, f"prompt {n}"), range(count)))


def test_clients_share_and_get_what_they_get_alone(shared: Running) -> None:
    assert send(shared, "/v1/autopipe/status")[1]["sharing"] == "batched"
    alone = [complete(shared, 30, f"prompt {n}") for n in range(8)]
    assert together(shared) == alone
    assert set(alone) != {alone[0]}


def test_all_stages_are_shown(shared: Running) -> None:
    complete(shared)
    status = send(shared, "/v1/autopipe/status")[1]
    assert [stage["name"] for stage in status["stages"]] == ["ngram", "small", "big"]
    assert workers(shared) == {"small", "big"}


def test_pins_change_no_output(shared: Running) -> None:
    expected = together(shared)
    for pin in (
        {"drafters": [{"stage": "small", "window": 2}]},
        {"drafters": [{"stage": "ngram", "window": 6}]},
        {"mode": "async", "drafters": [{"stage": "small", "window": 3}]},
        {"mode": "plain"},
    ):
        assert send(shared, PLAN, {"pinned": True, "plan": pin}, method="PUT")[0] == 200
        assert together(shared) == expected
    status, plan = send(shared, PLAN, {"pinned": False}, method="PUT")
    assert (status, plan["description"]) == (200, HOME)
    assert together(shared) == expected


def test_a_worker_that_is_killed_comes_back_with_its_drafters(shared: Running) -> None:
    expected = complete(shared)
    process = shared.service.ready().worker_ids()["small"]
    os.kill(process, signal.SIGKILL)
    until(lambda: shared.service.ready().worker_ids().get("small") not in (None, process))
    until(lambda: send(shared, "/health")[0] == 200)
    assert complete(shared) == expected


def test_long_idle_unloads_the_drafters_and_a_request_brings_them_back(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = complete(shared)
    fall_asleep(shared, monkeypatch)
    assert complete(shared) == expected
    until(lambda: workers(shared) == {"small", "big"})
    assert send(shared, PLAN)[1]["description"] == HOME


def test_a_drafter_that_fails_is_started_again_and_clients_notice_nothing() -> None:
    stages = chain().model_dump(mode="json")
    stages["chain"][1]["emulated"]["fail_after"] = 25
    with serving(Plan.parse(stages), control_interval_s=0.1) as running:
        texts = [together(running, 3) for _ in range(4)]
        assert texts == [texts[0]] * 4

        def happened() -> list[str]:
            events = [event.data for event in running.service.events.recent() if event.kind == "worker"]
            return [event["what"] for event in events if event["stage"] == "small"]

        until(lambda: "died" in happened())
        until(lambda: workers(running) == {"small", "big"} or "started" in happened())
        assert any("failed after 25" in note for note in running.service.ready().fallbacks())


def test_a_policy_at_work_on_shared_drafters_changes_no_output(shared: Running) -> None:
    expected = together(shared)
    with serving(chain(), control_interval_s=0.1, policy="bandit") as running:
        for _ in range(6):
            assert together(running) == expected
        plans = [event.data for event in running.service.events.recent() if event.kind == "plan"]
        assert plans, "the policy has never chosen a plan"
