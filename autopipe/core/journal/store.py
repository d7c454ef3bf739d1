"""The journal's SQLite file: requests, and their output in blocks. One thread at a time.

WAL, so that a commit is one sequential write and a killed process leaves a readable file; deleted prompts are
overwritten. One process at a time may hold the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.journal.record import Record, Status
from autopipe.core.sampling import SamplingParams

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    key TEXT PRIMARY KEY,
    prompt BLOB NOT NULL,
    params TEXT NOT NULL,
    eos TEXT NOT NULL,
    target TEXT NOT NULL,
    status TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    created_s REAL NOT NULL,
    updated_s REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blocks (
    key TEXT NOT NULL,
    position INTEGER NOT NULL,
    ids BLOB NOT NULL,
    PRIMARY KEY (key, position)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_time ON requests (updated_s);
"""


class JournalError(AutoPipeError):
    """The journal cannot be read or written."""


class JournalStore:
    """An open journal file.

    Args:
        path: made, readable by its owner alone, if it is not there.

    Raises:
        ConfigError: the folder does not exist, or another process holds the file.
        JournalError: it is not a journal, damaged, or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ConfigError("journal", str(path), "a file in a folder that exists")
        if self.path.is_dir():
            raise ConfigError("journal", str(path), "a file, not a folder")
        self._lock: int | None = self._take_lock()
        try:
            self._database = self._open()
        except BaseException:
            self._release()
            raise

    def _take_lock(self) -> int:
        try:
            descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"the journal {self.path} cannot be opened: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise ConfigError("journal", str(self.path), "a file that no other running server uses") from None
        return descriptor

    def _open(self) -> sqlite3.Connection:
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            database = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            try:
                version = database.execute("PRAGMA user_version").fetchone()[0]
                if version not in (0, SCHEMA_VERSION):
                    raise JournalError(f"{self.path} is a journal of another version ({version}); move it away")
                for pragma in ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=NORMAL", "secure_delete=ON"):
                    database.execute(f"PRAGMA {pragma}")
                database.executescript(_SCHEMA)
                database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            except BaseException:
                database.close()
                raise
            return database
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"{self.path} cannot be used as a journal: {error}; move it away") from error

    def put(
        self,
        accepted: Sequence[Record],
        tokens: Mapping[str, tuple[int, Sequence[int]]],
        states: Mapping[str, tuple[Status, str]],
    ) -> None:
        """Write a batch in one transaction.

        Args:
            accepted: new requests; one with a key that is there already replaces it, its output too.
            tokens: by key, the position of the first and the new output tokens from there on.
            states: by key, status and reason.

        Raises:
            JournalError: nothing of the batch is written.
        """
        now = time.time()
        with self._transaction():
            for record in accepted:
                self._database.execute("DELETE FROM blocks WHERE key = ?", (record.key,))
                self._database.execute(
                    "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        record.key,
                        _pack(record.prompt),
                        json.dumps(record.params.model_dump(mode="json", exclude_defaults=True)),
                        json.dumps(list(record.eos_token_ids)),
                        record.target,
                        record.status.value,
                        record.reason,
                        record.created_s,
                        now,
                    ),
                )
            self._database.executemany(
                "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)",
                [(key, position, _pack(ids)) for key, (position, ids) in tokens.items() if ids],
            )
            self._database.executemany(
                "UPDATE requests SET status = ?, reason = ?, updated_s = ? WHERE key = ?",
                [(status.value, reason, now, key) for key, (status, reason) in states.items()],
            )

    def get(self, key: str) -> Record | None:
        """The record of a key.

        Raises:
            JournalError: the file cannot be read.
        """
        with self._errors("read"):
            row = self._database.execute("SELECT * FROM requests WHERE key = ?", (key,)).fetchone()
            return None if row is None else self._record(row)

    def with_status(self, status: Status) -> list[Record]:
        """All records in a status, the oldest first."""
        with self._errors("read"):
            rows = self._database.execute(
                "SELECT * FROM requests WHERE status = ? ORDER BY created_s", (status.value,)
            ).fetchall()
            return [self._record(row) for row in rows]

    def counts(self) -> dict[str, int]:
        """Requests by status."""
        with self._errors("read"):
            return dict(self._database.execute("SELECT status, COUNT(*) FROM requests GROUP BY status").fetchall())

    def prune(self, max_age_s: float, max_requests: int) -> int:
        """Forget requests that are over and too old, and of the rest the oldest beyond `max_requests`; how many."""
        over = "status != 'running'"
        with self._transaction():
            old = self._database.execute(
                f"SELECT key FROM requests WHERE {over} AND updated_s < ?", (time.time() - max_age_s,)
            ).fetchall()
            many = self._database.execute(
                f"SELECT key FROM requests WHERE {over} ORDER BY updated_s DESC LIMIT -1 OFFSET ?", (max_requests,)
            ).fetchall()
            keys = {key for (key,) in (*old, *many)}
            for key in keys:
                self._database.execute("DELETE FROM blocks WHERE key = ?", (key,))
                self._database.execute("DELETE FROM requests WHERE key = ?", (key,))
        if keys:
            with self._errors("shrink"):
                self._database.execute("PRAGMA incremental_vacuum")
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return len(keys)

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _record(self, row: Sequence[object]) -> Record:
        key, prompt, params, eos, target, status, reason, created_s, updated_s = row
        blocks = self._database.execute(
            "SELECT position, ids FROM blocks WHERE key = ? ORDER BY position", (key,)
        ).fetchall()
        token_ids: list[int] = []
        for position, ids in blocks:
            if position > len(token_ids):
                break  # a gap: what follows cannot be used
            token_ids[position:] = _unpack(ids)
        return Record(
            str(key),
            _unpack(prompt),
            SamplingParams.parse(json.loads(str(params))),
            tuple(json.loads(str(eos))),
            str(target),
            Status(str(status)),
            str(reason),
            token_ids,
            float(str(created_s)),
            float(str(updated_s)),
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors("write"):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    @contextlib.contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, OverflowError) as error:
            raise JournalError(f"cannot {verb} the journal {self.path}: {error}") from error


def _pack(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _unpack(data: object) -> list[int]:
    if not isinstance(data, bytes) or len(data) % 4:
        raise ValueError("token ids of a wrong size")
    return array("i", data).tolist()
