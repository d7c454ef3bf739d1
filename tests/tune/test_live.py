"""Live runs of emulated stages: the real engine, in processes of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from autopipe.core.errors import AutoPipeError
from autopipe.core.plan import Plan
from autopipe.profile import ProfilePrompt
from autopipe.tune.live import LiveBench, OutOfTimeError, is_out_of_memory
from autopipe.tune.predict import plain_plan
from tests.tune.scenes import EMULATED

PLAN = Plan.parse(EMULATED)
PROMPT = ProfilePrompt("a", "chat", (1, 2, 3))


@pytest.fixture(scope="module")
def bench() -> Iterator[LiveBench]:
    with LiveBench(12, time.monotonic() + 1000) as opened:
        yield opened


def test_plans_with_the_same_models_share_a_process(bench: LiveBench) -> None:
    plain = bench.run(PLAN.replace(mode="plain"), PROMPT)
    first = bench._processes
    found = bench.run(PLAN, PROMPT)

    assert found.token_ids == plain.token_ids
    assert len(found.token_ids) == 12
    assert found.acceptance_length is not None
    assert found.acceptance_length > 1
    assert bench._processes is first
    assert len(first) == 1


def test_a_run_tells_the_memory_of_its_stages_alone(bench: LiveBench) -> None:
    found = bench.run(PLAN, PROMPT)
    (session,) = [psutil.Process(process._process.pid) for process in bench._processes.values()]
    stages = sum(stage.memory_info().rss for stage in session.children(recursive=True))

    assert found.memory_bytes is not None
    assert 0.1 * stages < found.memory_bytes < 1.1 * stages  # pages they share count once


def test_other_models_end_the_process_before(bench: LiveBench) -> None:
    bench.run(PLAN, PROMPT)
    (before,) = [process._process.pid for process in bench._processes.values()]
    bench.run(plain_plan(PLAN), PROMPT)

    assert len(bench._processes) == 1
    assert not psutil.pid_exists(before)


def test_a_plan_that_fails_leaves_the_bench_usable(bench: LiveBench) -> None:
    broken: dict[str, Any] = PLAN.model_dump()
    broken["chain"][1]["emulated"]["fail_after"] = 3
    with pytest.raises(AutoPipeError):
        bench.run(Plan.parse(broken), PROMPT)

    assert len(bench.run(PLAN, PROMPT).token_ids) == 12


def test_a_drafter_that_dies_is_not_taken_for_the_plan(bench: LiveBench) -> None:
    broken: dict[str, Any] = PLAN.model_dump()
    broken["chain"][0]["emulated"]["fail_after"] = 3
    with pytest.raises(AutoPipeError, match="not as planned"):
        bench.run(Plan.parse(broken), PROMPT)


def test_nothing_is_waited_for_beyond_the_deadline() -> None:
    slow: dict[str, Any] = PLAN.model_dump()
    slow["chain"][1]["emulated"]["ms"] = {1: 60_000}
    started = time.monotonic()
    with LiveBench(12, time.monotonic() + 1.0) as bench, pytest.raises(OutOfTimeError):
        bench.run(Plan.parse(slow), PROMPT)

    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "text", ["CUDA out of memory. Tried to allocate", "ModelLoadError: MemoryError", "ended (exit code -9)"]
)
def test_memory_that_is_out_is_told_by_every_name(text: str) -> None:
    assert is_out_of_memory(AutoPipeError(text))
    assert not is_out_of_memory(AutoPipeError("ended (exit code 1)"))
