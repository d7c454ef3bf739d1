"""The engine with real processes: plans, faults, clean-up. Stages are emulated, so a test costs little."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from autopipe.core.engine import Engine
from autopipe.core.errors import (
    AutoPipeError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    TargetDiedError,
)
from autopipe.core.plan import Plan
from autopipe.core.sampling import SamplingParams
from tests.core.pipeline import PROMPT, plain_output


def stage(
    name: str,
    agreement: float = 1.0,
    *,
    ms: float = 0.3,
    faults: dict[str, int] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    emulated = {"ms": {1: ms}, "agreement": agreement, "vocab_size": 64, **(faults or {})}
    return {"model": "emulated", "name": name, "emulated": emulated, **settings}


def plan(*stages: dict[str, Any], mode: str = "async", **settings: Any) -> Plan:
    return Plan.parse({"chain": stages, "mode": mode, **settings})


THREE = (stage("small", 0.6, window=5), stage("middle", 0.8, window=9), stage("target"))


def collect(engine: Engine, num_tokens: int = 60, **options: Any) -> list[int]:
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=num_tokens, **options))
    return [token for block in handle for token in block.token_ids]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(plan(*THREE)) as engine:
        yield engine


def test_output_is_plain_decodings_in_every_mode(engine: Engine) -> None:
    expected = plain_output(60)
    for mode in ("plain", "lockstep", "async"):
        engine.apply(plan(*THREE, mode=mode))
        assert collect(engine) == expected, mode


def test_requests_queue_and_each_gets_its_own_answer(engine: Engine) -> None:
    handles = [engine.submit([n + 1] * 3, SamplingParams(max_new_tokens=20)) for n in range(5)]
    for number, handle in enumerate(handles):
        text = [token for block in handle for token in block.token_ids]
        assert text == plain_output(20, prompt=[number + 1] * 3)


def test_a_cancelled_request_says_so_and_the_next_one_runs(engine: Engine) -> None:
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=100_000))
    next(iter(handle))
    handle.cancel()
    assert handle.outcome().finish_reason == "cancelled"
    assert collect(engine) == plain_output(60)


def test_a_request_cancelled_in_the_queue_never_starts(engine: Engine) -> None:
    first = engine.submit(PROMPT, SamplingParams(max_new_tokens=100_000))
    second = engine.submit(PROMPT, SamplingParams(max_new_tokens=10))
    second.cancel()
    assert second.outcome().finish_reason == "cancelled"
    assert second.num_tokens == 0
    first.cancel()
    first.outcome()


def test_stats_add_up(engine: Engine) -> None:
    engine.apply(plan(*THREE))
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=80), trace=True)
    stats = handle.outcome().stats
    assert [report.name for report in stats.stages] == ["small", "middle", "target"]
    assert stats.stages[-1].emitted == 80
    assert sum(length * times for length, times in stats.acceptance_histogram.items()) == 79  # all but the prefill's
    assert all(report.proposed >= report.accepted >= 0 for report in stats.stages)
    assert stats.total_s > 0
    assert stats.ttft_s is not None
    assert set(handle.outcome().trace) == {"small", "middle", "target"}


def test_windows_change_in_the_middle_of_a_request(engine: Engine) -> None:
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=300))
    text: list[int] = []
    for number, block in enumerate(handle):
        text += block.token_ids
        if number in (3, 6):
            engine.apply(plan(stage("small", 0.6, window=1 + number), stage("middle", 0.8, window=2), stage("target")))
    assert text == plain_output(300)
    assert handle.outcome().stats.plan_changes == 2


def test_chain_and_mode_change_in_the_middle_of_a_request(engine: Engine) -> None:
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=600))
    text: list[int] = []
    plans = iter(
        [
            plan(THREE[1], THREE[2], mode="lockstep"),
            plan(stage("new", 0.9, window=3), THREE[1], THREE[2], mode="async"),
            plan(*THREE, mode="plain"),
            plan(*THREE),
        ]
    )
    for number, block in enumerate(handle):
        text += block.token_ids
        if number % 10 == 5 and (following := next(plans, None)) is not None:
            engine.apply(following)
    assert text == plain_output(600)


def test_a_processor_sees_each_prefix_of_the_final_text_once_and_in_order(engine: Engine) -> None:
    engine.apply(plan(*THREE))
    seen: list[list[int]] = []

    def forbid_even(prefix: list[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        seen.append(prefix)
        row[::2] = -np.inf
        return row

    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=25), processor=forbid_even)
    text = [token for block in handle for token in block.token_ids]
    assert all(token % 2 for token in text)
    assert seen == [PROMPT + text[:count] for count in range(25)]


def test_an_error_in_a_processor_reaches_the_caller(engine: Engine) -> None:
    def broken(prefix: list[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        raise ZeroDivisionError("mine")

    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=5), processor=broken)
    with pytest.raises(ZeroDivisionError, match="mine"):
        handle.outcome()
    assert collect(engine) == plain_output(60)


def test_bad_prompts_are_refused_with_the_reason(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        engine.submit([], SamplingParams())
    with pytest.raises(ConfigError, match="from 0 to 63"):
        engine.submit([64], SamplingParams())
    with pytest.raises(ContextLengthError, match="max_new_tokens is 1048576"):
        engine.submit([1], SamplingParams(max_new_tokens=1 << 20))


def test_a_plan_that_cannot_load_leaves_the_old_one_in_force(engine: Engine) -> None:
    engine.apply(plan(*THREE))
    with pytest.raises(AutoPipeError):
        engine.apply(_unloadable())
    assert engine.plan == plan(*THREE)
    assert collect(engine) == plain_output(60)


def _unloadable() -> Plan:
    """A plan whose drafter is not there; the check that would refuse it earlier is not under test here."""
    return plan(*THREE).model_copy(
        update={"chain": (Plan.parse({"chain": [{"model": "/no/such/model"}]}).chain[0], *plan(*THREE).chain[1:])}
    )


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


def test_progress_of_the_request_under_way_grows_and_ends_with_it(engine: Engine) -> None:
    engine.apply(plan(*THREE))
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=20_000))
    seen = []
    for _ in handle:
        progress = engine.progress()
        if progress is not None and [report.name for report in progress[1]] == ["small", "middle", "target"]:
            seen.append(progress)
        if len(seen) > 1 and all(
            (seen[-1][1][0].proposed > seen[0][1][0].proposed, seen[-1][1][-1].forwards > seen[0][1][-1].forwards)
        ):
            break
    first, last = seen[0], seen[-1]
    assert first[0] == last[0] == handle.id
    assert last[1][-1].forwards > first[1][-1].forwards
    assert last[1][0].proposed > first[1][0].proposed
    handle.cancel()
    handle.outcome()
    assert engine.progress() is None


def test_a_bad_request_fails_alone(engine: Engine) -> None:
    """Neither the target nor the requests behind it suffer for it."""

    def bar_everything(prefix: list[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.full_like(row, -np.inf)

    pid = engine.worker_ids["target"]
    with pytest.raises(ConfigError, match="logit_bias"):
        engine.submit(PROMPT, SamplingParams(logit_bias={999: 1.0}))
    with pytest.raises(ConfigError, match="whole numbers"):
        engine.submit([1.5], SamplingParams())  # type: ignore[list-item]
    barred = engine.submit(PROMPT, SamplingParams(max_new_tokens=5), processor=bar_everything)
    behind = engine.submit(np.array(PROMPT), SamplingParams(max_new_tokens=20))  # type: ignore[arg-type]
    with pytest.raises(AutoPipeError, match="every token is barred"):
        barred.outcome()
    assert [token for block in behind for token in block.token_ids] == plain_output(20)
    assert engine.worker_ids["target"] == pid


@pytest.mark.parametrize("result", [np.zeros((1, 1)), np.zeros(3)])
def test_scores_of_another_shape_are_refused(engine: Engine, result: np.ndarray[Any, Any]) -> None:
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=5), processor=lambda prefix, row: result)
    with pytest.raises(ConfigError, match="logits_processor"):
        handle.outcome()


def test_a_processor_that_exits_ends_its_own_request_only(engine: Engine) -> None:
    def leave(prefix: list[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        sys.exit(3)

    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=5), processor=leave)
    with pytest.raises(SystemExit):
        handle.outcome()
    assert collect(engine) == plain_output(60)


def test_applying_from_a_processor_is_refused_instead_of_waiting_for_itself(engine: Engine) -> None:
    def change(prefix: list[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        engine.apply(plan(*THREE))
        return row

    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=5), processor=change)
    with pytest.raises(AutoPipeError, match="logits processor"):
        handle.outcome()


def test_a_processor_never_sees_a_prefix_behind_the_end(engine: Engine) -> None:
    text = plain_output(60)
    eos = text[25]
    cut = text[: text.index(eos) + 1]
    seen: list[list[int]] = []

    def watch(prefix: list[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        seen.append(prefix)
        return row

    engine.apply(plan(stage("perfect", window=8), stage("target"), mode="lockstep"))
    params = SamplingParams(max_new_tokens=60, eos_token_ids=(eos,))
    handle = engine.submit(PROMPT, params, processor=watch)
    assert [token for block in handle for token in block.token_ids] == cut
    assert seen == [PROMPT + cut[:count] for count in range(len(cut))]
    engine.apply(plan(*THREE))


def test_a_stopped_drafter_and_a_long_prompt_do_not_hold_the_engine_up() -> None:
    with Engine(plan(stage("small", 0.9, window=4), stage("target"))) as engine:
        os.kill(engine.worker_ids["small"], signal.SIGSTOP)
        prompt = [1] * 150_000
        handle = engine.submit(prompt, SamplingParams(max_new_tokens=10))
        assert len([token for block in handle for token in block.token_ids]) == 10
        assert collect(engine) == plain_output(60)


def test_a_copy_of_the_target_leaves_the_chain_in_the_middle_of_a_request() -> None:
    copy, target = stage("copy", window=4), stage("target")
    with Engine(plan(copy, target)) as engine:
        pid = engine.worker_ids["target"]
        handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=500))
        blocks = iter(handle)
        text = list(next(blocks).token_ids)
        engine.apply(plan(target, mode="plain"), timeout_s=20)
        text += [token for block in blocks for token in block.token_ids]
        assert text == plain_output(500)
        assert engine.worker_ids == {"target": pid}


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
