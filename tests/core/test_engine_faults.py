"""What the engine survives, and what it leaves behind: faults, ends, forks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from autopipe.core.engine import Engine
from autopipe.core.errors import (
    EngineClosedError,
    TargetDiedError,
)
from autopipe.core.sampling import SamplingParams
from tests.core.engine_scenes import THREE, collect, plan, stage
from tests.core.pipeline import PROMPT, plain_output


@pytest.mark.parametrize("fault", ["dies", "stops", "hangs", "raises"])
@pytest.mark.parametrize("mode", ["lockstep", "async"])
def test_the_chain_goes_on_without_a_drafter_that(fault: str, mode: str) -> None:
    faults = {"hangs": {"hang_after": 20}, "raises": {"fail_after": 20}}.get(fault, {})
    chain = (stage("small", 0.9, window=4, faults=faults, ms=1), stage("target", ms=2))
    with Engine(plan(*chain, mode=mode)) as engine:
        handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=400))
        text: list[int] = []
        longest_s, last = 0.0, time.monotonic()
        for number, block in enumerate(handle):
            longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
            text += block.token_ids
            if number == 5 and fault in ("dies", "stops"):
                os.kill(engine.worker_ids["small"], signal.SIGKILL if fault == "dies" else signal.SIGSTOP)
        assert text == plain_output(400)
        assert handle.outcome().stats.fallbacks
        assert "small" in handle.outcome().stats.fallbacks[0]
        assert longest_s < 5, "noticing took far too long"


def test_a_lost_drafter_comes_back_for_a_later_request() -> None:
    with Engine(plan(stage("small", 0.9, window=4), stage("target"))) as engine:
        os.kill(engine.worker_ids["small"], signal.SIGKILL)
        collect(engine)
        deadline = time.monotonic() + 60
        while "small" not in engine.worker_ids and time.monotonic() < deadline:
            time.sleep(0.05)
            collect(engine, 5)
        while not engine.facts("small") and time.monotonic() < deadline:
            time.sleep(0.05)
        handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=60))
        outcome = handle.outcome()
        assert [report.name for report in outcome.stats.stages] == ["small", "target"]
        assert outcome.stats.stages[0].accepted > 0


def test_a_dead_target_fails_every_waiting_request_and_the_next_restarts_it() -> None:
    with Engine(plan(stage("small", 0.9, window=4), stage("target", ms=5))) as engine:
        handles = [engine.submit(PROMPT, SamplingParams(max_new_tokens=1000)) for _ in range(3)]
        next(iter(handles[0]))
        os.kill(engine.worker_ids["target"], signal.SIGKILL)
        for handle in handles:
            with pytest.raises(TargetDiedError, match="target"):
                handle.outcome()
        assert collect(engine, 30) == plain_output(30)


def test_closing_fails_what_waits_and_leaves_no_process() -> None:
    engine = Engine(plan(*THREE))
    pids = list(engine.worker_ids.values())
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=100_000))
    engine.close()
    with pytest.raises(EngineClosedError):
        handle.outcome()
    with pytest.raises(EngineClosedError):
        engine.submit(PROMPT, SamplingParams())
    assert not any(psutil.pid_exists(pid) for pid in pids)


SCRIPT = """
    import sys, time
    from autopipe.core.engine import Engine
    from autopipe.core.plan import Plan
    from autopipe.core.sampling import SamplingParams
    stage = {"model": "emulated", "window": 4, "emulated": {"ms": {1: 5}, "vocab_size": 64}}
    engine = Engine(Plan.parse({"chain": [{**stage, "name": "a"}, {**stage, "name": "b"}], "mode": "async"}))
    handle = engine.submit([1, 2], SamplingParams(max_new_tokens=100000))
    print(*engine.worker_ids.values(), flush=True)
    for block in handle:
        pass
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_when_the_program_is_ended_no_worker_and_no_shared_memory_is_left(number: signal.Signals) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)
    program.send_signal(number)
    program.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_alive(pid) for pid in pids)
    assert set(os.listdir("/dev/shm")) <= shared_before


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_abandoned_engine_ends_its_workers() -> None:
    engine = Engine(plan(stage("target")))
    (pid,) = engine.worker_ids.values()
    del engine
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def test_random_schedules_of_plans_cancellations_and_kills_leave_output_and_process_clean() -> None:
    """Complements the 300 schedules per property in test_stage.py with real processes and real time."""
    chance = random.Random(7)
    process = psutil.Process()
    expected = plain_output(400)
    others = set(process.children())
    with Engine(plan(*THREE)) as engine:
        collect(engine, 5)
        descriptors = process.num_fds()
        for round_number in range(60):
            chain = [
                stage("small", 0.6, window=chance.randint(1, 6)),
                stage("middle", 0.8, window=chance.randint(3, 12), min_drafts=chance.randint(0, 1)),
                stage("target", min_drafts=chance.randint(0, 3), when_short=chance.choice(["wait", "step"])),
            ]
            engine.apply(plan(*chain, mode=chance.choice(["async", "lockstep", "plain"])))
            length = chance.randint(1, 120)
            cancel_after = chance.choice([None, None, chance.randint(1, 30)])
            kill_after = chance.randint(1, 10) if round_number % 12 == 6 else None
            handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=length))
            text: list[int] = []
            for number, block in enumerate(handle):
                text += block.token_ids
                if number == cancel_after:
                    handle.cancel()
                if number == kill_after:
                    victim = engine.worker_ids.get(chance.choice(["small", "middle"]))
                    if victim:
                        os.kill(victim, signal.SIGKILL)
            assert text == expected[: len(text)]
            if handle.outcome().finish_reason == "length":
                assert len(text) == length
        assert process.num_fds() <= descriptors + 2
        children = set(process.children()) - others
    deadline = time.monotonic() + 10
    while any(_alive(child.pid) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(child.pid) for child in children)


def test_a_stopped_drafter_and_a_long_prompt_do_not_hold_the_engine_up() -> None:
    with Engine(plan(stage("small", 0.9, window=4), stage("target"))) as engine:
        os.kill(engine.worker_ids["small"], signal.SIGSTOP)
        prompt = [1] * 150_000
        handle = engine.submit(prompt, SamplingParams(max_new_tokens=10))
        assert len([token for block in handle for token in block.token_ids]) == 10
        assert collect(engine) == plain_output(60)


def test_a_drafter_that_dies_is_still_in_the_figures() -> None:
    with Engine(plan(stage("small", 0.9, window=4), stage("target"))) as engine:
        handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=2000))
        for number, _ in enumerate(handle):
            if number == 20:
                os.kill(engine.worker_ids["small"], signal.SIGKILL)
        reports = {report.name: report for report in handle.outcome().stats.stages}
        assert reports["small"].proposed > 0
        assert reports["small"].forwards > 0


def test_cores_that_do_not_exist_are_noted_and_do_no_harm() -> None:
    with Engine(plan(stage("target", cores=[4095]))) as engine:
        assert collect(engine) == plain_output(60)
        assert any("4095" in text for text in engine.fallbacks)


def test_in_a_fork_the_engine_is_refused_and_leaves_the_workers_alone(engine: Engine) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine.submit(PROMPT, SamplingParams())
        except EngineClosedError:
            engine.close()
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert collect(engine) == plain_output(60)
