"""The journal over a shared engine: one request per key, whoever asks and however often, across processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopipe.core.errors import ConfigError, ContextLengthError, QueueFullError
from autopipe.core.journal import Journal, JournalError, Status
from autopipe.core.plan import Plan
from autopipe.core.request import RequestHandle
from autopipe.core.sampling import SamplingParams
from autopipe.core.shared import SharedEngine, SharingOptions
from tests.core.pipeline import PROMPT, plain_output

EMULATED = {"ms": {1: 1.0}, "vocab_size": 64}
PLAN = Plan.parse({"chain": [{"model": "emulated", "name": "target", "emulated": EMULATED}]})
OTHER_TARGET = Plan.parse({"chain": [{"model": "emulated", "emulated": {**EMULATED, "seed": 4}}]})


@pytest.fixture(scope="module")
def engine() -> Iterator[SharedEngine]:
    with SharedEngine(PLAN, SharingOptions(max_active=8, max_batch=8, max_waiting=2)) as engine:
        yield engine


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.sqlite") as journal:
        yield journal


def text(handle: RequestHandle) -> list[int]:
    return [token for block in handle for token in block.token_ids]


def params(num_tokens: int = 30, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, **options)


class DeadEngine:
    """Stands for an engine that has died after some tokens: a handle that only ever gets those."""

    continues = True

    def __init__(self, plan: Plan = PLAN) -> None:
        self.plan = plan

    def check_request(self, prompt: list[int], params: SamplingParams) -> list[int]:
        return list(prompt)

    def submit(self, prompt: list[int], params: SamplingParams, **options: Any) -> RequestHandle:
        from autopipe.core.request import TokenBlock

        handle = RequestHandle(1, prompt, params, (), None, False, lambda _: None)
        handle.put_tokens(TokenBlock(plain_output(9)))
        return handle


def cut_off(path: Path, key: str = "k", num_tokens: int = 30, plan: Plan = PLAN, **options: Any) -> None:
    """Leave a request in the journal that a crash has cut off after nine tokens."""
    with Journal(path) as journal:
        journal.submit(DeadEngine(plan), key, PROMPT, params(num_tokens, **options))


def test_a_request_is_answered_and_kept(engine: SharedEngine, journal: Journal) -> None:
    handle = journal.submit(engine, "k", PROMPT, params())
    assert text(handle) == plain_output(30)
    assert handle.outcome().finish_reason == "length"
    record = journal.lookup("k")
    assert record is not None
    assert (record.token_ids, record.status, record.reason) == (plain_output(30), Status.FINISHED, "length")


def test_the_same_key_gets_the_same_answer_without_running_again(engine: SharedEngine, journal: Journal) -> None:
    text(journal.submit(engine, "k", PROMPT, params()))
    before = engine.num_tokens
    again = journal.submit(engine, "k", PROMPT, params())
    assert text(again) == plain_output(30)
    assert again.outcome().finish_reason == "length"
    assert engine.num_tokens == before


def test_a_key_under_way_is_joined_and_both_get_everything(engine: SharedEngine, journal: Journal) -> None:
    first = journal.submit(engine, "k", PROMPT, params(200))
    next(iter(first))
    second = journal.submit(engine, "k", PROMPT, params(200))
    assert text(second) == plain_output(200)
    assert first.outcome().finish_reason == "length"


def test_one_of_two_may_leave_and_the_last_to_leave_ends_the_request(engine: SharedEngine, journal: Journal) -> None:
    first = journal.submit(engine, "k", PROMPT, params(100_000))
    second = journal.submit(engine, "k", PROMPT, params(100_000))
    first.cancel()
    assert first.outcome().finish_reason == "cancelled"
    assert next(iter(second)).token_ids
    second.cancel()
    assert second.outcome().finish_reason == "cancelled"
    record = journal.lookup("k")
    assert record is not None
    assert record.status is Status.CANCELLED


def test_a_cancelled_request_that_is_asked_for_again_goes_on(engine: SharedEngine, journal: Journal) -> None:
    handle = journal.submit(engine, "k", PROMPT, params(400))
    next(iter(handle))
    handle.cancel()
    handle.outcome()
    assert text(journal.submit(engine, "k", PROMPT, params(400))) == plain_output(400)


def test_a_key_with_another_request_is_refused(engine: SharedEngine, journal: Journal) -> None:
    text(journal.submit(engine, "k", PROMPT, params()))
    for prompt, other in (([9, 9], params()), (PROMPT, params(31)), (PROMPT, params(seed=2))):
        with pytest.raises(ConfigError, match="idempotency_key"):
            journal.submit(engine, "k", prompt, other)


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb"])
def test_keys_that_cannot_be_are_refused(engine: SharedEngine, journal: Journal, key: str) -> None:
    with pytest.raises(ConfigError, match="idempotency_key"):
        journal.submit(engine, key, PROMPT, params())


def test_a_request_that_the_engine_refuses_is_not_kept(engine: SharedEngine, journal: Journal) -> None:
    with pytest.raises(ContextLengthError):
        journal.submit(engine, "k", PROMPT, params(1 << 20))
    many = [engine.submit(PROMPT, params(100_000)) for _ in range(10)]
    with pytest.raises(QueueFullError):
        journal.submit(engine, "k", PROMPT, params())
    for handle in many:
        handle.cancel()
        handle.outcome()
    assert journal.lookup("k") is None


def test_a_request_that_was_cut_off_is_continued_and_asking_for_it_gives_all(
    engine: SharedEngine, tmp_path: Path
) -> None:
    cut_off(tmp_path / "journal")
    with Journal(tmp_path / "journal") as journal:
        before = engine.num_tokens
        assert journal.recover(engine) == 1
        assert journal.wait_recovered(60)
        assert text(journal.submit(engine, "k", PROMPT, params())) == plain_output(30)
        assert engine.num_tokens - before == 21


def test_asking_for_it_before_it_is_continued_gives_all_too(engine: SharedEngine, tmp_path: Path) -> None:
    cut_off(tmp_path / "journal")
    with Journal(tmp_path / "journal") as journal:
        assert text(journal.submit(engine, "k", PROMPT, params())) == plain_output(30)
        assert journal.recover(engine) == 0


def test_without_a_client_it_is_completed(engine: SharedEngine, tmp_path: Path) -> None:
    cut_off(tmp_path / "journal")
    with Journal(tmp_path / "journal") as journal:
        journal.recover(engine)
        deadline = time.monotonic() + 60
        while journal.counts() != {"finished": 1}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        record = journal.lookup("k")
        assert record is not None
        assert record.token_ids == plain_output(30)


def test_under_another_target_it_is_reported_and_not_continued(engine: SharedEngine, tmp_path: Path) -> None:
    cut_off(tmp_path / "journal", plan=OTHER_TARGET)
    with Journal(tmp_path / "journal") as journal:
        journal.recover(engine)
        assert journal.wait_recovered(60)
        record = journal.lookup("k")
        assert record is not None
        assert (record.status, "another target" in record.reason) == (Status.FAILED, True)
        assert text(journal.submit(engine, "k", PROMPT, params())) == plain_output(30)


def test_with_logprobs_it_runs_from_its_start_so_that_none_is_missing(engine: SharedEngine, tmp_path: Path) -> None:
    cut_off(tmp_path / "journal", num_logprobs=1)
    with Journal(tmp_path / "journal") as journal:
        blocks = list(journal.submit(engine, "k", PROMPT, params(num_logprobs=1)))
        assert [token for block in blocks for token in block.token_ids] == plain_output(30)
        assert sum(len(block.logprobs or []) for block in blocks) == 30


def test_an_engine_that_cannot_continue_computes_again_and_streams_nothing_twice(
    engine: SharedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedEngine, "continues", False)
    cut_off(tmp_path / "journal")
    with Journal(tmp_path / "journal") as journal:
        assert text(journal.submit(engine, "k", PROMPT, params())) == plain_output(30)
        record = journal.lookup("k")
        assert record is not None
        assert record.token_ids == plain_output(30)


def test_a_journal_that_cannot_be_written_refuses_the_request(
    engine: SharedEngine, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise JournalError("the disk is full")

    monkeypatch.setattr("autopipe.core.journal.store.JournalStore.put", fails)
    with pytest.raises(JournalError, match="full"):
        journal.submit(engine, "k", PROMPT, params())
    assert journal.fault == "the disk is full"
    monkeypatch.undo()
    deadline = time.monotonic() + 60
    while journal.fault is not None:
        assert time.monotonic() < deadline
        journal._writer.set_status("nobody", Status.FAILED, "")
        time.sleep(0.05)
    assert text(journal.submit(engine, "k", PROMPT, params())) == plain_output(30)


def test_bad_limits_are_refused(tmp_path: Path) -> None:
    for wrong in ({"max_age_s": 0.0}, {"max_age_s": float("nan")}, {"max_requests": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Journal(tmp_path / "journal", **wrong)


def test_after_kill_9_of_the_whole_process_the_text_is_that_of_an_uninterrupted_run(
    engine: SharedEngine, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    script = f"""
        import os, sys, time
        from autopipe.core.journal import Journal
        from autopipe.core.sampling import SamplingParams
        from autopipe.core.shared import SharedEngine
        from tests.core.journal.test_journal import PLAN, PROMPT
        journal = Journal({str(path)!r})
        engine = SharedEngine(PLAN)
        for number in range(3):
            options = SamplingParams(max_new_tokens=300, seed=number)
            handle = journal.submit(engine, str(number), [number + 1] * 3, options)
        for block in handle:
            if handle.num_tokens > 20:
                print("running", engine.worker_ids["target"], flush=True)
                time.sleep(60)
    """
    server = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert server.stdout is not None
    assert server.stdout.readline().startswith(b"running")
    time.sleep(0.1)  # some of what it has is on disk then
    server.send_signal(signal.SIGKILL)
    server.wait()
    server.stdout.close()
    with Journal(path) as journal:
        records = {key: journal.lookup(key) for key in "012"}
        assert any(record is not None and record.token_ids for record in records.values())
        assert journal.recover(engine) == 3
        for number in range(3):
            prompt = [number + 1] * 3
            handle = journal.submit(engine, str(number), prompt, SamplingParams(max_new_tokens=300, seed=number))
            assert text(handle) == plain_output(300, prompt=prompt)
