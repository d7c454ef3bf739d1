"""Exactly as many trials as were asked for, whoever runs them.

What is asked for is put into the study as waiting trials. A worker claims one by changing its state from waiting to
running, which the storage lets happen once. So the count is the storage's own: any number of workers, in any number of
processes, started together or later, run each of them once and no other.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from autopipe.tune.storage import HEARTBEAT_S

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

WORKER = "worker"
"""User attribute of a trial: who runs it, as host, process and the process's start."""
ERROR = "error"
"""User attribute of a failed trial: why."""
RETRY_OF = "retry_of"
"""User attribute of a trial: number of the lost trial that it stands in for."""


def ask_for(study: Study, count: int, fixed: Sequence[Mapping[str, Any]] = ()) -> None:
    """Add `count` trials to what is to be run; the first of them with these parameters."""
    for place in range(count):
        study.enqueue_trial(dict(fixed[place]) if place < len(fixed) else {})


def claim(study: Study) -> Trial | None:
    """Take the next waiting trial; None if there is none."""
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import Trial, TrialState

    storage = study._storage  # Optuna's own `ask` would make a new trial when the last has just been taken
    for waiting in storage.get_all_trials(study._study_id, deepcopy=False, states=(TrialState.WAITING,)):
        try:
            taken = storage.set_trial_state_values(waiting._trial_id, state=TrialState.RUNNING)
        except UpdateFinishedTrialError:
            continue
        if taken:
            return sign(Trial(study, waiting._trial_id))
    return None


def claim_new(study: Study) -> Trial:
    """Take a waiting trial or, if there is none, a new one."""
    from optuna.trial import Trial

    trial = claim(study)
    if trial is None:
        trial = sign(Trial(study, study._storage.create_new_trial(study._study_id)))
    return trial


def take_back_lost(study: Study, *, retry: bool = True) -> int:
    """Fail running trials whose worker is gone, and put one in place of each that has not been lost before.

    Args:
        retry: false: only fail them.

    Returns:
        How many were put back.
    """
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    storage = study._storage
    stale = set(_stale_ids(study))
    count = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial._trial_id not in stale and not _worker_is_gone(trial):
            continue
        try:
            storage.set_trial_user_attr(trial._trial_id, ERROR, "its worker ended before the trial did")
            if not storage.set_trial_state_values(trial._trial_id, state=TrialState.FAIL):
                continue
        except UpdateFinishedTrialError:
            continue  # someone else was faster
        if retry and RETRY_OF not in trial.user_attrs:  # one that was lost twice may be the reason
            study.enqueue_trial(dict(trial.params), user_attrs={RETRY_OF: trial.number})
            count += 1
    return count


def put_back(study: Study, trial: Trial) -> None:
    """Give up a trial that was interrupted: it fails, and another one takes its place."""
    from optuna.trial import TrialState

    study.enqueue_trial(dict(trial.params), user_attrs={RETRY_OF: trial.number})
    trial.set_user_attr(ERROR, "interrupted")
    study.tell(trial, state=TrialState.FAIL)


class Heartbeat:
    """Says, every few seconds, that trials are still running; does nothing where the storage keeps no heartbeats."""

    def __init__(self, study: Study) -> None:
        self._storage = study._storage
        self._enabled = _keeps_heartbeats(self._storage)
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="tune-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._enabled:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._enabled:
            self._thread.join()

    def watch(self, trial: Trial) -> None:
        """From now on, until `unwatch` or the end."""
        with self._lock:
            self._running.add(trial._trial_id)
        if self._enabled:
            self._storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]

    def unwatch(self, trial: Trial) -> None:
        with self._lock:
            self._running.discard(trial._trial_id)

    @contextmanager
    def of(self, trial: Trial) -> Iterator[None]:
        """While `trial` runs."""
        self.watch(trial)
        try:
            yield
        finally:
            self.unwatch(trial)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with self._lock:
                running = list(self._running)
            for trial_id in running:
                self._storage.record_heartbeat(trial_id)  # type: ignore[attr-defined]


def sign(trial: Trial) -> Trial:
    """Note on a trial that this process runs it."""
    process = psutil.Process()
    who = {"host": socket.gethostname(), "pid": os.getpid(), "started": process.create_time()}
    trial.set_user_attr(WORKER, who)
    return trial


def _stale_ids(study: Study) -> list[int]:
    storage: Any = study._storage
    return list(storage._get_stale_trial_ids(study._study_id)) if _keeps_heartbeats(storage) else []


def _keeps_heartbeats(storage: Any) -> bool:
    return getattr(storage, "get_heartbeat_interval", lambda: None)() is not None


def _worker_is_gone(trial: FrozenTrial) -> bool:
    """Whether the trial was claimed on this machine by a process that no longer runs."""
    who = trial.user_attrs.get(WORKER)
    if not isinstance(who, dict) or who.get("host") != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(int(who["pid"])).create_time() - float(who["started"])) > 1.0
    except psutil.NoSuchProcess:
        return True
    except (psutil.AccessDenied, KeyError, TypeError, ValueError):
        return False
