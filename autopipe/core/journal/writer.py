"""Writes to the journal from a thread of its own, in batches: the engine's thread only ever appends to a list."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from autopipe.core.journal.record import Record, Status
from autopipe.core.journal.store import JournalError, JournalStore

_log = logging.getLogger(__name__)

FLUSH_S = 0.05
"""Output waits this long at most before it is written: what a crash can lose, and the next run computes again."""
PRUNE_S = 60.0
_RETRY_S = 1.0


@dataclass(slots=True)
class _Batch:
    """What waits to be written."""

    accepted: dict[str, Record] = field(default_factory=dict)
    tokens: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    states: dict[str, tuple[Status, str]] = field(default_factory=dict)
    promises: list[Future[None]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.accepted or self.tokens or self.states or self.promises)

    def add_tokens(self, key: str, position: int, ids: list[int]) -> None:
        first, held = self.tokens.get(key, (position, []))
        self.tokens[key] = (first, [*held[: position - first], *ids])


class JournalWriter:
    """Owns the thread. `accept` waits until its record is on disk; everything else returns at once.

    Args:
        max_age_s, max_requests: what is over and older, or beyond, is forgotten.
    """

    def __init__(self, store: JournalStore, max_age_s: float, max_requests: int) -> None:
        self.fault: str | None = None
        self._store = store
        self._limits = (max_age_s, max_requests)
        self._store_gate = threading.Lock()
        self._wake = threading.Condition()
        self._batch = _Batch()
        self._urgent = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="autopipe-journal", daemon=True)
        self._thread.start()

    def accept(self, record: Record, timeout_s: float = 10.0) -> None:
        """Write a record and wait until it is on disk.

        Raises:
            JournalError: it could not be written.
        """
        promise: Future[None] = Future()
        with self._wake:
            if self._closing:
                raise JournalError("the journal is closed")
            self._batch.accepted[record.key] = record
            self._batch.tokens.pop(record.key, None)
            self._batch.states.pop(record.key, None)
            if record.token_ids:
                self._batch.add_tokens(record.key, 0, list(record.token_ids))
            self._batch.promises.append(promise)
            self._urgent = True
            self._wake.notify()
        try:
            promise.result(timeout_s)
        except TimeoutError:
            raise JournalError(f"the journal {self._store.path} takes longer than {timeout_s:g} s to write") from None

    def append(self, key: str, position: int, ids: list[int]) -> None:
        """Output tokens `ids` follow the first `position` ones."""
        with self._wake:
            self._batch.add_tokens(key, position, ids)
            self._wake.notify()

    def set_status(self, key: str, status: Status, reason: str) -> None:
        with self._wake:
            self._batch.states[key] = (status, reason)
            self._wake.notify()

    def read(self, key: str) -> Record | None:
        """A record as it is on disk; flush first for the latest. Raises JournalError."""
        with self._store_gate:
            return self._store.get(key)

    def with_status(self, status: Status) -> list[Record]:
        """Records on disk in a status. Raises JournalError."""
        with self._store_gate:
            return self._store.with_status(status)

    def counts(self) -> dict[str, int]:
        """Requests on disk by status. Raises JournalError."""
        with self._store_gate:
            return self._store.counts()

    def flush(self, timeout_s: float = 10.0) -> None:
        """Wait until everything so far is on disk. Raises JournalError."""
        promise: Future[None] = Future()
        with self._wake:
            if self._closing:
                return
            self._batch.promises.append(promise)
            self._urgent = True
            self._wake.notify()
        try:
            promise.result(timeout_s)
        except TimeoutError:
            raise JournalError(f"the journal {self._store.path} takes longer than {timeout_s:g} s to write") from None

    def close(self) -> None:
        """Write what waits, end the thread, close the file. May be called more than once."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._store.close()

    def _run(self) -> None:
        pruned_s = 0.0
        while True:
            with self._wake:
                while self._batch.empty and not self._closing:
                    if not self._wake.wait(PRUNE_S):
                        break
                if not self._urgent and not self._closing:
                    self._wake.wait_for(lambda: self._urgent or self._closing, FLUSH_S)
                batch, self._batch, self._urgent = self._batch, _Batch(), False
                closing = self._closing
            if not batch.empty and not self._write(batch, closing):
                continue
            if time.monotonic() - pruned_s > PRUNE_S:
                pruned_s = time.monotonic()
                self._prune()
            if closing:
                return

    def _write(self, batch: _Batch, closing: bool) -> bool:
        """Write a batch, or put it back and wait a little; whether the thread may go on."""
        try:
            with self._store_gate:
                self._store.put(list(batch.accepted.values()), batch.tokens, batch.states)
        except JournalError as error:
            if self.fault is None:
                _log.error("%s; it is tried again every second", error)
            self.fault = str(error)
            for promise in batch.promises:
                promise.set_exception(error)
            batch.promises.clear()
            if closing:
                return True
            self._put_back(batch)
            time.sleep(_RETRY_S)
            return False
        self.fault = None
        for promise in batch.promises:
            promise.set_result(None)
        return True

    def _put_back(self, batch: _Batch) -> None:
        """Before what has come since. Records whose acceptance failed are not: their callers have been told."""
        with self._wake:
            newer, self._batch = self._batch, batch
            for record in batch.accepted.values():
                batch.tokens.pop(record.key, None)
                batch.states.pop(record.key, None)
            batch.accepted = newer.accepted
            for key, (position, ids) in newer.tokens.items():
                batch.add_tokens(key, position, ids)
            batch.states.update(newer.states)
            batch.promises = newer.promises

    def _prune(self) -> None:
        try:
            with self._store_gate:
                self._store.prune(*self._limits)
        except JournalError as error:
            _log.error("%s", error)
