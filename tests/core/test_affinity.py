"""Cores of stages where the platform binds processes to cores, and where it does not."""

from __future__ import annotations

import os
from typing import Any

import pytest

from autopipe.core.affinity import allowed_cores, bind_cores
from autopipe.core.plan import Plan
from autopipe.core.preflight import check_plan

EMULATED: dict[str, Any] = {"model": "emulated", "emulated": {"ms": {1: 1}, "vocab_size": 256, "max_length": 1000}}


@pytest.fixture
def no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform such as macOS."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sched_setaffinity")


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
