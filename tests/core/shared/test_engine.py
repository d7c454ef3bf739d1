"""The shared engine with a real process: many requests, faults, clean-up. The target is emulated, so it is cheap."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from autopipe.core.errors import (
    AutoPipeError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    QueueFullError,
    TargetDiedError,
)
from autopipe.core.plan import NgramOptions, Plan, StagePlan
from autopipe.core.request import RequestHandle
from autopipe.core.sampling import SamplingParams
from autopipe.core.shared import SharedEngine, SharingOptions, reason_unshareable
from tests.core.pipeline import PROMPT, plain_output


def plan(ms: float = 0.3, *, drafter: bool = True, faults: dict[str, Any] | None = None, **settings: Any) -> Plan:
    emulated = {"ms": {1: ms}, "vocab_size": 64, **(faults or {})}
    chain: list[dict[str, Any]] = [{"model": "ngram", "window": 5}] if drafter else []
    return Plan.parse({"chain": [*chain, {"model": "emulated", "name": "target", "emulated": emulated}], **settings})


def text(handle: RequestHandle) -> list[int]:
    return [token for block in handle for token in block.token_ids]


def submit(engine: SharedEngine, num_tokens: int = 40, prompt: list[int] = PROMPT, **options: Any) -> RequestHandle:
    return engine.submit(prompt, SamplingParams(max_new_tokens=num_tokens, **options))


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def engine() -> Iterator[SharedEngine]:
    with SharedEngine(plan(), SharingOptions(max_active=16, max_batch=8, max_waiting=16)) as engine:
        yield engine


def test_each_of_many_requests_gets_its_own_answer(engine: SharedEngine) -> None:
    handles = [submit(engine, prompt=[n + 1] * 3) for n in range(20)]
    for number, handle in enumerate(handles):
        assert text(handle) == plain_output(40, prompt=[number + 1] * 3)
        outcome = handle.outcome()
        assert outcome.finish_reason == "length"
        assert outcome.stats.stages[-1].emitted == 40
        assert outcome.stats.ttft_s is not None


def test_the_worker_is_bound_to_the_cores_of_its_plan() -> None:
    core = min(os.sched_getaffinity(0))
    bare = plan(drafter=False)
    bound = bare.replace(chain=[bare.target.replace(cores=(core,))])
    with SharedEngine(bound) as engine:
        assert len(text(submit(engine))) == 40
        assert psutil.Process(engine.worker_ids["target"]).cpu_affinity() == [core]


def test_requests_run_at_the_same_time(engine: SharedEngine) -> None:
    handles = [submit(engine, 100_000) for _ in range(3)]
    wait_until(lambda: engine.num_running == 3)
    load = engine.load()
    assert load.running == 3
    assert sorted(load.progress) == [handle.id for handle in handles]
    assert load.progress[handles[0].id][-1].name == "target"
    assert engine.recent[-3:] == handles
    for handle in handles:
        handle.cancel()
    assert [handle.outcome().finish_reason for handle in handles] == ["cancelled"] * 3
    assert engine.load().running == 0


def test_a_cancelled_request_ends_at_once_and_the_others_go_on(engine: SharedEngine) -> None:
    others = [submit(engine, 200, prompt=[n + 1] * 3) for n in range(2)]
    handle = submit(engine, 100_000)
    next(iter(handle))
    handle.cancel()
    assert handle.outcome().finish_reason == "cancelled"
    for number, other in enumerate(others):
        assert text(other) == plain_output(200, prompt=[number + 1] * 3)


def test_a_request_that_was_cancelled_before_it_began_has_an_outcome(engine: SharedEngine) -> None:
    handle = submit(engine)
    handle.cancel()
    handle.cancel()
    assert handle.outcome().finish_reason in ("cancelled", "length")


def test_plans_change_while_requests_run(engine: SharedEngine) -> None:
    handle = submit(engine, 400)
    next(iter(handle))
    engine.apply(plan(mode="plain"))
    assert engine.plan.mode.value == "plain"
    engine.apply(plan())
    rest = text(handle)
    assert rest == plain_output(400)[-len(rest) :]
    assert handle.outcome().stats.plan_changes == 2


def test_what_is_learned_online_is_saved(engine: SharedEngine, tmp_path: Path) -> None:
    with pytest.raises(AutoPipeError, match="online"):
        engine.save_ngrams(tmp_path / "table")
    learning = plan().model_copy(
        update={"chain": (StagePlan(model="ngram", ngram=NgramOptions(online=True)), plan().target)}
    )
    engine.apply(learning)
    handles = [submit(engine, prompt=[n + 1] * 3) for n in range(3)]
    for number, handle in enumerate(handles):
        assert text(handle) == plain_output(40, prompt=[number + 1] * 3)
    assert engine.save_ngrams(tmp_path / "table") > 0
    assert (tmp_path / "table").exists()
    engine.apply(plan())


def test_the_load_factor_is_what_company_costs() -> None:
    with SharedEngine(
        plan(drafter=False, faults={"ms": {1: 2.0, 2: 6.0, 8: 8.0}}), SharingOptions(max_active=4, max_batch=4)
    ) as engine:
        handles = [submit(engine, 100_000) for _ in range(4)]
        wait_until(lambda: engine.num_running == 4)
        assert engine.load_factor() > 1.5
        for handle in handles:
            handle.cancel()
            handle.outcome()
        assert engine.load_factor() == 1.0


def test_the_longest_running_request_is_shown(engine: SharedEngine) -> None:
    handles = [submit(engine, 100_000) for _ in range(2)]
    wait_until(lambda: engine.num_running == 2)
    assert engine.running is handles[0]
    assert (engine.progress() or (0, []))[0] == handles[0].id
    for handle in handles:
        handle.cancel()
        handle.outcome()
    assert engine.running is None


def test_another_target_is_refused(engine: SharedEngine) -> None:
    with pytest.raises(ConfigError, match="this target"):
        engine.apply(plan(ms=9.0))


def test_a_continuation_streams_only_what_is_new(engine: SharedEngine) -> None:
    whole = plain_output(40)
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=40), output=whole[:15])
    assert text(handle) == whole[15:]


def test_the_users_own_processor_is_applied_to_its_request_alone(engine: SharedEngine) -> None:
    def always_seven(prefix: list[int], row: np.ndarray) -> np.ndarray:
        row[:] = -np.inf
        row[7] = 0
        return row

    other = submit(engine)
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=5), processor=always_seven)
    assert text(handle) == [7] * 5
    assert text(other) == plain_output(40)


def test_a_failing_processor_fails_its_request_alone(engine: SharedEngine) -> None:
    def fails(prefix: list[int], row: np.ndarray) -> np.ndarray:
        raise ZeroDivisionError("mine")

    other = submit(engine)
    with pytest.raises(ZeroDivisionError, match="mine"):
        text(engine.submit(PROMPT, SamplingParams(max_new_tokens=5), processor=fails))
    assert text(other) == plain_output(40)


def test_bad_requests_are_refused(engine: SharedEngine) -> None:
    for prompt in ([], [64], [-1]):
        with pytest.raises(ConfigError):
            submit(engine, prompt=prompt)
    with pytest.raises(ContextLengthError):
        submit(engine, num_tokens=1 << 20)
    for output in ([64], [1] * 40):
        with pytest.raises(ConfigError, match="output"):
            engine.submit(PROMPT, SamplingParams(max_new_tokens=40), output=output)


def test_traces_and_facts_are_there(engine: SharedEngine) -> None:
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=10), trace=True)
    outcome = handle.outcome()
    assert outcome.trace["target"][0].name == "prefill"
    assert engine.facts("target")["vocab_size"] == 64
    assert engine.facts("someone") == {}
    step_s = engine.step_s(1)
    assert step_s is not None
    assert step_s > 0


@pytest.fixture(scope="module")
def fragile() -> Iterator[SharedEngine]:
    """An engine for two at a time, whose worker does not live long."""
    with SharedEngine(
        plan(2.0), SharingOptions(max_active=2, max_batch=2, max_waiting=3, quantum_tokens=10**6)
    ) as engine:
        yield engine


def test_one_request_more_than_may_wait_is_refused(fragile: SharedEngine) -> None:
    handles = [submit(fragile, 100_000) for _ in range(2)]
    wait_until(lambda: fragile.num_running == 2)
    handles += [submit(fragile, 5) for _ in range(3)]
    with pytest.raises(QueueFullError) as refused:
        submit(fragile)
    assert refused.value.waiting == 3
    assert 1 <= refused.value.retry_after_s <= 60
    for handle in handles[:2]:
        handle.cancel()
    assert [len(text(handle)) for handle in handles[2:]] == [5] * 3


def test_a_killed_worker_fails_what_ran_keeps_what_waited_and_comes_back(fragile: SharedEngine) -> None:
    running = [submit(fragile, 100_000) for _ in range(2)]
    for handle in running:
        next(iter(handle))
    waiting = submit(fragile, 30)
    pid = fragile.worker_ids["target"]
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    for handle in running:
        with pytest.raises(TargetDiedError):
            text(handle)
    assert time.monotonic() - killed < 1.0
    assert text(waiting) == plain_output(30)
    assert fragile.worker_ids["target"] != pid
    assert any("target" in note for note in fragile.fallbacks)


def test_killing_the_worker_at_any_moment_hangs_nobody(fragile: SharedEngine) -> None:
    for delay_s in (0.0, 0.03, 0.4):
        handles = [submit(fragile, 30) for _ in range(4)]
        time.sleep(delay_s)
        for pid in fragile.worker_ids.values():
            os.kill(pid, signal.SIGKILL)
        for handle in handles:
            with contextlib.suppress(TargetDiedError):
                assert text(handle) == plain_output(30)


def test_a_stopped_worker_is_given_up(fragile: SharedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = submit(fragile, 100_000)
    next(iter(handle))
    monkeypatch.setattr("autopipe.core.shared.keeper._PATIENCE_S", 0.5)
    os.kill(fragile.worker_ids["target"], signal.SIGSTOP)
    with pytest.raises(TargetDiedError, match="silent"):
        text(handle)
    monkeypatch.undo()
    assert text(submit(fragile)) == plain_output(40)


def test_a_request_that_kills_the_worker_again_and_again_is_given_up() -> None:
    with SharedEngine(plan(faults={"fail_after": 1})) as engine, pytest.raises(TargetDiedError, match="failed after 1"):
        text(submit(engine))


def test_a_hung_step_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopipe.core.shared.keeper._PATIENCE_S", 0.0)
    with SharedEngine(plan(faults={"hang_after": 20})) as engine, pytest.raises(TargetDiedError, match="hung"):
        text(submit(engine, 1000))


def test_closing_fails_what_runs_and_waits_and_leaves_nothing() -> None:
    process = psutil.Process()
    before_descriptors = process.num_fds()
    engine = SharedEngine(plan(2.0), SharingOptions(max_active=1, max_batch=1))
    handles = [submit(engine, 100_000) for _ in range(3)]
    next(iter(handles[0]))
    pids = list(engine.worker_ids.values())
    engine.close()
    engine.close()
    for handle in handles:
        with pytest.raises(EngineClosedError):
            text(handle)
    with pytest.raises(EngineClosedError):
        submit(engine)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    wait_until(lambda: process.num_fds() <= before_descriptors)


def test_a_target_that_does_not_load_says_why() -> None:
    with pytest.raises(AutoPipeError, match="no-such-model"):
        SharedEngine(Plan.parse({"chain": [{"model": "no-such-model-anywhere.gguf"}]}))


@pytest.mark.parametrize(
    ("chain", "settings", "word"),
    [
        ([{"model": "a", "cores": [0]}, {"model": "b"}], {}, "cores"),
        ([{"model": "a", "cuda": {"mps_percent": 30}}, {"model": "b"}], {}, "share of the GPU"),
        ([{"model": "b"}], {"verification": "rejection"}, "rejection"),
        ([{"model": "b", "device_map": "auto"}], {}, "devices"),
    ],
)
def test_plans_that_cannot_be_shared_are_refused_with_the_reason(
    chain: list[dict[str, Any]], settings: dict[str, Any], word: str
) -> None:
    wrong = Plan.parse({"chain": chain, **settings})
    assert word in str(reason_unshareable(wrong))
    with pytest.raises(ConfigError, match=word):
        SharedEngine(wrong)


def test_plans_that_can_be_shared_have_no_reason() -> None:
    for mode in ("plain", "lockstep", "async"):
        assert reason_unshareable(plan(mode=mode)) is None
