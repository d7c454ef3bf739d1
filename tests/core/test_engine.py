"""The engine with real processes: requests, plans and figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopipe.core.engine import Engine
from autopipe.core.errors import (
    AutoPipeError,
    ConfigError,
    ContextLengthError,
)
from autopipe.core.plan import Plan
from autopipe.core.sampling import SamplingParams
from tests.core.engine_scenes import THREE, collect, plan, stage
from tests.core.pipeline import PROMPT, plain_output


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


def test_recent_requests_are_those_that_have_begun_in_that_order(engine: Engine) -> None:
    first, second, waiting = (engine.submit(PROMPT, SamplingParams(max_new_tokens=n)) for n in (5, 20_000, 5))
    first.outcome()
    next(iter(second))
    assert engine.recent[-2:] == [first, second]
    second.cancel()
    waiting.outcome()
    assert engine.recent[-3:] == [first, second, waiting]


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
