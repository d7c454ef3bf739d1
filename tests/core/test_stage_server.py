"""What a stage's process tells the engine when a request begins."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from autopipe.core.sampling import SamplingParams
from autopipe.core.stage_server import StageServer

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


def stage_server(notes: list[str], shortfalls: tuple[str, ...] = ()) -> StageServer:
    """A server with a loaded stage that begins requests, and nothing else; what it tells its engine is in `notes`."""
    board: Any = SimpleNamespace(slot=lambda index: None)
    channel: Any = SimpleNamespace(send=lambda message: notes.append(message["text"]))
    server = StageServer(channel, board, 0, [])
    stage: Any = SimpleNamespace(config=SimpleNamespace(consumer=None), begin=lambda request, trace: None)
    backend: Any = SimpleNamespace(vocab_size=256, shortfalls=shortfalls)
    server._stage, server._backend = stage, backend
    return server


def test_every_request_is_told_what_the_backend_could_not_do() -> None:
    notes = list[str]()
    server = stage_server(notes, shortfalls=("no CUDA graphs: the driver is too old",))
    server._begin(BEGIN)
    server._begin(BEGIN)
    assert notes == ["no CUDA graphs: the driver is too old"] * 2


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
