"""Neural drafters of a shared engine with a real process: loaded, kept, changed, lost, all while requests run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopipe.core.errors import AutoPipeError
from autopipe.core.plan import Plan
from autopipe.core.shared import SharedEngine, SharingOptions
from tests.core.pipeline import PROMPT, plain_output
from tests.core.shared.test_engine import submit, text, wait_until


def plan(*drafters: dict[str, Any], ms: float = 0.3, **settings: Any) -> Plan:
    emulated = {"ms": {1: ms}, "vocab_size": 64}
    return Plan.parse(
        {"chain": [*drafters, {"model": "emulated", "name": "target", "emulated": emulated}], "mode": "lockstep"}
        | settings
    )


def small(agreement: float = 0.8, window: int = 4, **extra: Any) -> dict[str, Any]:
    spec = {"ms": {1: 0.1}, "vocab_size": 64, "agreement": agreement, **extra}
    return {"model": "emulated", "name": "small", "window": window, "emulated": spec}


NGRAM = {"model": "ngram", "window": 3}


@pytest.fixture(scope="module")
def engine() -> Iterator[SharedEngine]:
    with SharedEngine(plan(NGRAM, small()), SharingOptions(max_active=16, max_batch=8)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def usual(request: pytest.FixtureRequest) -> None:
    """Every test finds the module's engine with its first plan in force."""
    if "engine" in request.fixturenames:
        engine: SharedEngine = request.getfixturevalue("engine")
        engine.keep_loaded([])
        engine.apply(plan(NGRAM, small()))


def check(engine: SharedEngine, count: int = 6, tokens: int = 40) -> None:
    """Requests that come together get what the target says to each."""
    handles = [submit(engine, tokens, prompt=[n + 1] * 3) for n in range(count)]
    assert [text(handle) for handle in handles] == [plain_output(tokens, prompt=[n + 1] * 3) for n in range(count)]


def test_each_of_many_requests_gets_its_own_answer(engine: SharedEngine) -> None:
    check(engine, 20)


def test_stats_show_every_stage(engine: SharedEngine) -> None:
    for n in range(3):  # one after another: alone a request drafts as the plan says
        handle = submit(engine, 60, prompt=[n + 1] * 3)
        text(handle)
        stages = {stage.name: stage for stage in handle.outcome().stats.stages}
        assert list(stages)[-2:] == ["small", "target"]
        assert stages["small"].forwards > 0
        assert stages["small"].busy_s > 0
        assert 0.4 < (stages["small"].acceptance_rate or 0) <= 1
        assert stages["small"].proposed >= stages["small"].accepted > 10
        assert stages["target"].emitted == 60
        assert not handle.outcome().stats.fallbacks


def test_drafters_are_stages_like_any_other_for_who_looks(engine: SharedEngine) -> None:
    ids = engine.worker_ids
    assert list(ids) == ["small", "target"]
    assert ids["small"] == ids["target"]
    assert engine.facts("small")["vocab_size"] == 64
    assert engine.facts("small")["step_ms"]["1"] > 0


def test_windows_change_without_loading(engine: SharedEngine) -> None:
    handle = submit(engine, 400)
    next(iter(handle))
    for window in (1, 6, 2):
        engine.apply(plan(NGRAM, small(window=window)))
    text(handle)
    assert handle.outcome().stats.plan_changes == 3
    assert set(engine.worker_ids) == {"small", "target"}


def test_a_drafter_leaves_and_joins_while_requests_run(engine: SharedEngine) -> None:
    handles = [submit(engine, 300, prompt=[n + 1] * 3) for n in range(4)]
    next(iter(handles[0]))
    engine.apply(plan(NGRAM))
    assert set(engine.worker_ids) == {"target"}
    engine.apply(plan(small()))
    assert set(engine.worker_ids) == {"small", "target"}
    got = [text(handle) for handle in handles]
    for n in range(1, 4):
        assert got[n] == plain_output(300, prompt=[n + 1] * 3)


def test_what_is_kept_stays_loaded_without_a_plan_that_uses_it(engine: SharedEngine) -> None:
    engine.keep_loaded([plan(NGRAM, small())])
    engine.apply(plan(NGRAM))
    assert set(engine.worker_ids) == {"small", "target"}
    engine.keep_loaded([])
    wait_until(lambda: set(engine.worker_ids) == {"target"})
    check(engine, 2)


def test_plain_decoding_keeps_the_drafters_of_its_chain(engine: SharedEngine) -> None:
    engine.apply(plan(NGRAM, small(), mode="plain"))
    handle = submit(engine)
    assert text(handle) == plain_output(40)
    assert [stage.name for stage in handle.outcome().stats.stages] == ["target"]
    assert set(engine.worker_ids) == {"small", "target"}


def test_a_drafter_that_cannot_be_loaded_is_refused_and_the_old_plan_goes_on(tiny_folder: Path) -> None:
    target = {"model": str(tiny_folder), "name": "target", "threads": 1}
    missing = {"model": str(tiny_folder / "not-there"), "name": "other"}
    wrong = Plan.parse({"chain": [missing, target], "mode": "lockstep"})
    with pytest.raises(AutoPipeError, match="not-there"):
        SharedEngine(wrong)
    with SharedEngine(Plan.parse({"chain": [NGRAM, target], "mode": "lockstep"})) as engine:
        before, handle = engine.plan, submit(engine, 100)
        first = next(iter(handle)).token_ids
        with pytest.raises(AutoPipeError, match="not-there"):
            engine.apply(wrong)
        assert engine.plan == before
        whole = first + text(handle)
        assert len(whole) == 100
        assert text(submit(engine, 100)) == whole


def test_a_drafter_that_fails_is_left_out_told_of_and_loaded_anew_when_asked(engine: SharedEngine) -> None:
    engine.apply(plan(small(fail_after=30)))
    handle = submit(engine, 200)
    assert text(handle) == plain_output(200)
    wait_until(lambda: set(engine.worker_ids) == {"target"})
    assert any("'small'" in note and "failed after 30" in note for note in handle.outcome().stats.fallbacks)
    engine.apply(engine.plan)
    assert set(engine.worker_ids) == {"small", "target"}
    assert text(submit(engine, 10)) == plain_output(10)


def test_a_killed_worker_comes_back_with_its_drafters() -> None:
    with SharedEngine(plan(small())) as engine:
        check(engine, 2)
        os.kill(engine.worker_ids["target"], signal.SIGKILL)
        check(engine, 2)
        wait_until(lambda: set(engine.worker_ids) == {"small", "target"})
        handle = submit(engine)
        assert text(handle) == plain_output(40)
        assert "small" in [stage.name for stage in handle.outcome().stats.stages]


def test_stages_that_work_at_the_same_time_are_shared_too(engine: SharedEngine) -> None:
    engine.apply(plan(NGRAM, small(), mode="async"))
    check(engine, 20)
    handle = submit(engine, 60)
    assert text(handle) == plain_output(60)
    stages = {stage.name: stage for stage in handle.outcome().stats.stages}
    assert stages["small"].forwards > 0
    assert stages["small"].accepted > 0


def test_the_mode_changes_while_requests_run(engine: SharedEngine) -> None:
    handles = [submit(engine, 300, prompt=[n + 1] * 3) for n in range(4)]
    next(iter(handles[0]))
    for mode in ("async", "plain", "async", "lockstep"):
        engine.apply(plan(NGRAM, small(), mode=mode))
    got = [text(handle) for handle in handles]
    for n in range(1, 4):
        assert got[n] == plain_output(300, prompt=[n + 1] * 3)


def test_a_drafter_that_fails_while_it_works_ahead_is_left_out(engine: SharedEngine) -> None:
    engine.apply(plan(small(fail_after=30), mode="async"))
    handle = submit(engine, 200)
    assert text(handle) == plain_output(200)
    wait_until(lambda: set(engine.worker_ids) == {"target"})
    assert any("'small'" in note and "failed after 30" in note for note in handle.outcome().stats.fallbacks)


def test_cancelling_one_of_many_leaves_the_others_their_text(engine: SharedEngine) -> None:
    handles = [submit(engine, 300, prompt=[n + 1] * 3) for n in range(4)]
    next(iter(handles[1]))
    handles[1].cancel()
    for n in (0, 2, 3):
        assert text(handles[n]) == plain_output(300, prompt=[n + 1] * 3)
    assert handles[1].outcome().finish_reason == "cancelled"


def test_a_request_alone_is_what_it_is_among_others_when_sampled(engine: SharedEngine) -> None:
    options = {"temperature": 1.0, "seed": 11}
    alone = text(submit(engine, 60, **options))
    together = [submit(engine, 60, **options), *(submit(engine, 60, prompt=[n + 1] * 3) for n in range(5))]
    assert text(together[0]) == alone
    for handle in together[1:]:
        text(handle)


def test_prompts_of_many_pieces_are_drafted_for_once_they_are_read(engine: SharedEngine) -> None:
    long = PROMPT * 60
    alone = submit(engine, 60, prompt=long)
    assert text(alone) == plain_output(60, prompt=long)
    stages = {stage.name: stage for stage in alone.outcome().stats.stages}
    assert stages["small"].catch_up_s > 0
    assert stages["small"].accepted > 0
    handles = [submit(engine, 30, prompt=[*long, n]) for n in range(3)]
    for n, handle in enumerate(handles):
        assert text(handle) == plain_output(30, prompt=[*long, n])
