"""Cores of stages where the platform binds processes to cores, and where it does not."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from autopipe.core.affinity import allowed_cores, bind_cores
from autopipe.core.plan import Plan
from autopipe.core.preflight import check_plan
from autopipe.core.sampling import SamplingParams
from autopipe.core.stage_server import StageServer

EMULATED: dict[str, Any] = {"model": "emulated", "emulated": {"ms": {1: 1}, "vocab_size": 256, "max_length": 1000}}
BEGIN: dict[str, Any] = {
    "type": "begin",
    "request": 1,
    "params": SamplingParams().model_dump(mode="json"),
    "prompt": [1, 2],
    "verification": "equality",
    "vocab_size": 256,
    "eos": [],
    "stage": 0,
    "processor": False,
    "trace": False,
}


@pytest.fixture
def no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform such as macOS."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sched_setaffinity")


def stage_server(notes: list[str]) -> StageServer:
    """A server with a loaded stage that begins requests, and nothing else; what it tells its engine is in `notes`."""
    board: Any = SimpleNamespace(slot=lambda index: None)
    channel: Any = SimpleNamespace(send=lambda message: notes.append(message["text"]))
    server = StageServer(channel, board, 0, [])
    stage: Any = SimpleNamespace(config=SimpleNamespace(consumer=None), begin=lambda request, trace: None)
    backend: Any = SimpleNamespace(vocab_size=256, shortfalls=())
    server._stage, server._backend = stage, backend
    return server


def test_cores_that_are_allowed_can_be_bound_to() -> None:
    cores = allowed_cores()
    assert cores
    assert bind_cores(cores) is None


def test_what_the_system_says_against_cores_is_told() -> None:
    reason = bind_cores([max(allowed_cores() or {0}) + 100_000])
    assert reason is not None
    assert reason.startswith("not bound to cores [")


@pytest.mark.usefixtures("no_affinity")
def test_a_plan_with_cores_passes_the_check_where_cores_are_not_known() -> None:
    check_plan(Plan.parse({"chain": [{**EMULATED, "cores": [0, 1]}]}))


@pytest.mark.usefixtures("no_affinity")
def test_without_affinity_every_request_is_told_why_its_stage_is_not_bound() -> None:
    notes = list[str]()
    server = stage_server(notes)
    server._bind([0, 1], None)
    assert notes == ["not bound to cores [0, 1]: this platform cannot bind a process to cores"]
    server._begin(BEGIN)
    server._begin(BEGIN)
    assert notes == notes[:1] * 3


@pytest.mark.usefixtures("no_affinity")
def test_without_affinity_a_stage_that_asks_for_no_cores_has_nothing_to_tell() -> None:
    notes = list[str]()
    server = stage_server(notes)
    server._bind(None, None)
    server._begin(BEGIN)
    assert notes == []
