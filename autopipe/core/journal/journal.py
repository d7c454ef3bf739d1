"""The journal: requests with an idempotency key survive the process.

Only what was asked and the accepted tokens are kept, never drafts. A request that was cut off goes on after its last
persisted token: the noise of a position depends on seed and position alone, and the target's rows on the text alone,
so the whole output is the one that an uninterrupted run gives.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from autopipe.core.errors import AutoPipeError, ConfigError, QueueFullError
from autopipe.core.journal.live import LiveRequest
from autopipe.core.journal.record import Record, Status, fingerprint
from autopipe.core.journal.store import JournalStore
from autopipe.core.journal.writer import JournalWriter
from autopipe.core.plan import Plan
from autopipe.core.request import Outcome, RequestHandle, TokenBlock
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import RequestStats

_log = logging.getLogger(__name__)

MAX_KEY_CHARS = 255


class JournaledEngine(Protocol):
    """What the journal needs of an engine. One whose `continues` is true takes `output=` in `submit`."""

    @property
    def plan(self) -> Plan: ...

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> list[int]: ...

    def submit(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> RequestHandle: ...


class Journal:
    """Keeps requests in an SQLite file. Safe to use from any thread.

    Args:
        path: the file; made if it is not there, for its owner alone.
        max_age_s: requests that are over are forgotten after this time.
        max_requests: and the oldest of them beyond this number.

    Raises:
        ConfigError: a path or limit that cannot be used, or a file that another process holds.
        JournalError: a file that is no journal, or damaged.
    """

    def __init__(self, path: str | Path, *, max_age_s: float = 86400.0, max_requests: int = 10_000) -> None:
        if not max_age_s > 0:
            raise ConfigError("max_age_s", max_age_s, "more than 0 seconds")
        if max_requests < 0:
            raise ConfigError("max_requests", max_requests, "0 or more")
        self._writer = JournalWriter(JournalStore(path), max_age_s, max_requests)
        self._gate = threading.RLock()
        self._live: dict[str, LiveRequest] = {}
        self._recovery: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def fault(self) -> str | None:
        """Why the journal cannot be written at the moment; None while it can."""
        return self._writer.fault

    def counts(self) -> dict[str, int]:
        """Requests in the journal by status: running, finished, cancelled, failed."""
        return self._writer.counts()

    def lookup(self, key: str) -> Record | None:
        """What is known of a key, the latest tokens included; None: nothing.

        Raises:
            JournalError: the file cannot be read or written.
        """
        self._writer.flush()
        return self._writer.read(key)

    def submit(
        self,
        engine: JournaledEngine,
        key: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> RequestHandle:
        """Submit a request under a key, or join the one that has it.

        The handle gets the whole output: of a request that is over at once, of one under way from its beginning on, of
        one that was cut off what was persisted and then the rest. When this returns, the request is on disk.

        Raises:
            ConfigError: a key that is empty, too long, or was used with another prompt or other options; and what
                the engine's `submit` raises.
            JournalError: the journal cannot be written; the request does not run.
        """
        _check_key(key)
        eos = tuple(map(int, eos_token_ids)) if params.eos_token_ids is None else params.eos_token_ids
        ids = engine.check_request(prompt, params)
        with self._gate:
            live = self._live.get(key)
            if live is not None:
                _check_same(live.record, ids, params, eos)
                return live.follow()
            record = self.lookup(key)
            if record is not None:
                _check_same(record, ids, params, eos)
                if record.status is Status.FINISHED and params.num_logprobs is None:
                    return _replay(record)
            given = _usable_output(record, engine, params)
            started = Record(key, ids, params, eos, _target(engine.plan), token_ids=given, created_s=time.time())
            return self._start(engine, started, detached=False).follow()

    def recover(self, engine: JournaledEngine) -> int:
        """Go on with all requests that were cut off, in the background; return how many there are.

        Those of another target are not continued but marked as failed, with the reason.

        Raises:
            JournalError: the file cannot be read.
        """
        self._writer.flush()
        with self._gate:
            records = [found for found in self._writer.with_status(Status.RUNNING) if found.key not in self._live]
        self._recovery = threading.Thread(
            target=self._recover_all, args=(engine, records), name="autopipe-journal-recovery", daemon=True
        )
        self._recovery.start()
        return len(records)

    def wait_recovered(self, timeout_s: float | None = None) -> bool:
        """Wait until all requests of `recover` have been handed to the engine; whether they have."""
        if self._recovery is not None:
            self._recovery.join(timeout_s)
            return not self._recovery.is_alive()
        return True

    def close(self) -> None:
        """Write what waits and close the file; close the engine first. May be called more than once."""
        self._closing.set()
        if self._recovery is not None:
            self._recovery.join()
        self._writer.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- starting -------------------------------------------------------------------------------------------

    def _start(self, engine: JournaledEngine, record: Record, *, detached: bool) -> LiveRequest:
        """Hand a request to the engine and put it on disk, or neither; the caller holds the gate."""
        options: dict[str, Any] = {"eos_token_ids": record.eos_token_ids}
        continues = bool(getattr(engine, "continues", False))
        if continues:
            options["output"] = record.token_ids
        inner = engine.submit(record.prompt, record.params, **options)
        try:
            self._writer.accept(record)
        except BaseException:
            inner.cancel()
            raise
        live = LiveRequest(record, self._writer, detached=detached, forget=self._forget)
        self._live[record.key] = live
        live.attach(inner, len(record.token_ids) if continues else 0)
        return live

    def _forget(self, live: LiveRequest) -> None:
        # Without the gate, which whoever starts a request holds while this one's own lock is wanted.
        if self._live.get(live.record.key) is live:
            del self._live[live.record.key]

    def _recover_all(self, engine: JournaledEngine, records: Sequence[Record]) -> None:
        for record in records:
            while not self._closing.is_set():
                try:
                    with self._gate:
                        found = None if record.key in self._live else self.lookup(record.key)
                        if found is not None and found.status is Status.RUNNING:  # else it was asked for meanwhile
                            self._recover(engine, found)
                    break
                except QueueFullError as full:
                    self._closing.wait(min(full.retry_after_s, 1.0))
                except AutoPipeError as error:
                    _log.warning("a request in the journal cannot be continued: %s", error)
                    self._writer.set_status(record.key, Status.FAILED, str(error))
                    break

    def _recover(self, engine: JournaledEngine, record: Record) -> None:
        if record.target != _target(engine.plan):
            gone = "it was cut off, and the server now runs another target"
            self._writer.set_status(record.key, Status.FAILED, gone)
            return
        reason = _finish_reason(record)
        if reason is not None:
            self._writer.set_status(record.key, Status.FINISHED, reason)
            return
        if record.params.num_logprobs is not None:
            record.token_ids = []
        self._start(engine, record, detached=True)


def _check_key(key: str) -> None:
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise ConfigError("idempotency_key", key[:40], f"1 to {MAX_KEY_CHARS} printable characters")


def _check_same(record: Record, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int]) -> None:
    if record.fingerprint != fingerprint(prompt, params, eos):
        allowed = "a key of its own for each request: this one was used with another prompt or other options"
        raise ConfigError("idempotency_key", record.key, allowed)


def _target(plan: Plan) -> str:
    """What must be the same for a continuation to be identical: the target, and how it rounds here."""
    from autopipe.core.kernels import instruction_set

    identity: Mapping[str, Any] = {**plan.target.identity(), "exact": plan.exact, "isa": instruction_set()}
    return json.dumps(identity, sort_keys=True)


def _usable_output(record: Record | None, engine: JournaledEngine, params: SamplingParams) -> list[int]:
    """Persisted tokens to go on from. None where they are another target's, or where log-probabilities, which are not
    persisted, are wanted for each of them: the request then runs from its start, to the same tokens."""
    if record is None or record.target != _target(engine.plan) or params.num_logprobs is not None:
        return []
    if _finish_reason(record) is not None:
        return record.token_ids[:-1]
    return record.token_ids


def _finish_reason(record: Record) -> str | None:
    """How a record's output has ended though its status does not say so yet; None: it has not."""
    if record.token_ids and record.token_ids[-1] in record.eos_token_ids:
        return "stop"
    return "length" if len(record.token_ids) >= record.params.max_new_tokens else None


def _replay(record: Record) -> RequestHandle:
    """A handle that holds a finished request's whole output."""
    handle = RequestHandle(0, record.prompt, record.params, record.eos_token_ids, None, False, lambda _: None)
    handle.begun_s = handle.submitted_s
    if record.token_ids:
        handle.put_tokens(TokenBlock(record.token_ids))
    stats = RequestStats(total_s=0.0, fallbacks=["answered from the journal"])
    handle.put_outcome(Outcome(record.reason, stats, {}))
    return handle
