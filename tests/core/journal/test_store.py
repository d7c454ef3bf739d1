"""The journal's file: what is written is read back, what is over is forgotten, and no two servers share it."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from autopipe.core.errors import ConfigError
from autopipe.core.journal.record import Record, Status
from autopipe.core.journal.store import JournalError, JournalStore
from autopipe.core.sampling import SamplingParams


def record(key: str, **fields: object) -> Record:
    return Record(key, [1, 2, 3], SamplingParams(seed=5, stop=("x",)), (7,), "target", **fields)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> JournalStore:
    return JournalStore(tmp_path / "journal.sqlite")


def test_what_is_written_is_read_back(store: JournalStore) -> None:
    store.put([record("a", created_s=12.5)], {"a": (0, [4, 5])}, {})
    store.put([], {"a": (2, [6])}, {"a": (Status.FINISHED, "length")})
    read = store.get("a")
    assert read is not None
    assert (read.prompt, read.params, read.eos_token_ids) == ([1, 2, 3], SamplingParams(seed=5, stop=("x",)), (7,))
    assert (read.token_ids, read.status, read.reason, read.created_s) == ([4, 5, 6], Status.FINISHED, "length", 12.5)
    assert store.get("b") is None


def test_a_key_that_is_accepted_anew_loses_its_old_output(store: JournalStore) -> None:
    store.put([record("a")], {"a": (0, [4, 5, 6])}, {})
    store.put([record("a")], {"a": (0, [8])}, {})
    read = store.get("a")
    assert read is not None
    assert read.token_ids == [8]


def test_output_after_a_gap_is_not_used(store: JournalStore) -> None:
    store.put([record("a")], {"a": (0, [4])}, {})
    store.put([], {"a": (5, [9])}, {})
    read = store.get("a")
    assert read is not None
    assert read.token_ids == [4]


def test_requests_are_found_by_status_the_oldest_first(store: JournalStore) -> None:
    store.put([record("new", created_s=2.0), record("old", created_s=1.0), record("done", created_s=0.0)], {}, {})
    store.put([], {}, {"done": (Status.CANCELLED, "cancelled")})
    assert [found.key for found in store.with_status(Status.RUNNING)] == ["old", "new"]
    assert store.counts() == {"running": 2, "cancelled": 1}


def test_what_is_over_is_forgotten_by_number_and_what_runs_is_kept(store: JournalStore) -> None:
    store.put([record(str(number)) for number in range(6)], {"0": (0, [1])}, {})
    for number in range(5):
        store.put([], {}, {str(number): (Status.FINISHED, "stop")})
    assert store.prune(1e9, 2) == 3
    assert store.counts() == {"finished": 2, "running": 1}
    assert store.prune(-1.0, 100) == 2
    assert store.counts() == {"running": 1}


def test_forgotten_prompts_leave_no_trace_in_the_file(store: JournalStore) -> None:
    secret = [0x5EC4E7, 0x0DDBA11] * 20
    store.put([Record("a", secret, SamplingParams(), (), "t")], {}, {"a": (Status.FINISHED, "stop")})
    store.prune(-1.0, 0)
    store.close()
    content = store.path.read_bytes()
    assert bytes.fromhex("e7c45e00") not in content


def test_the_file_is_for_its_owner_alone(store: JournalStore) -> None:
    assert stat.S_IMODE(os.stat(store.path).st_mode) == 0o600


def test_a_second_server_is_refused_until_the_first_has_closed(store: JournalStore) -> None:
    with pytest.raises(ConfigError, match="no other running server"):
        JournalStore(store.path)
    store.close()
    JournalStore(store.path).close()


def test_files_that_are_no_journal_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello " * 1000)
    with pytest.raises(JournalError, match="move it away"):
        JournalStore(tmp_path / "text")
    database = sqlite3.connect(tmp_path / "other")
    database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(JournalError, match="version"):
        JournalStore(tmp_path / "other")
    for wrong in (tmp_path, tmp_path / "nowhere" / "journal"):
        with pytest.raises(ConfigError, match="journal"):
            JournalStore(wrong)


def test_a_batch_that_fails_is_not_written_in_part(store: JournalStore) -> None:
    with pytest.raises(JournalError):
        store.put([record("a")], {"a": (0, [1 << 40])}, {})
    assert store.get("a") is None
