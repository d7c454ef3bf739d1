from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from autopipe.tune import claims, storage
from autopipe.tune.claims import RETRY_OF, WORKER, Heartbeat, ask_for, claim, claim_new, put_back, take_back_lost
from autopipe.tune.storage import open_storage
from tests.tune.scenes import wait_until


@pytest.fixture
def study() -> optuna.Study:
    return optuna.create_study(storage=open_storage(None))


def test_each_trial_that_was_asked_for_is_claimed_once(study: optuna.Study) -> None:
    ask_for(study, 3)
    claimed = [claim(study) for _ in range(4)]

    assert [None if trial is None else trial.number for trial in claimed] == [0, 1, 2, None]


def test_the_first_trials_have_the_parameters_they_were_given(study: optuna.Study) -> None:
    ask_for(study, 2, [{"x": 3}])
    first, second = claim(study), claim(study)

    assert first is not None
    assert first.suggest_int("x", 0, 9) == 3
    assert second is not None


def test_a_new_trial_is_made_only_when_none_waits(study: optuna.Study) -> None:
    ask_for(study, 1)

    assert [claim_new(study).number for _ in range(3)] == [0, 1, 2]
    assert len(study.trials) == 3


@pytest.mark.parametrize("url", ["sqlite:///{}/s.db", "journal:///{}/s.log"])
def test_workers_at_once_run_exactly_what_was_asked(tmp_path: Path, url: str) -> None:
    url = url.format(tmp_path)
    asked = optuna.create_study(storage=open_storage(url), study_name="s")
    ask_for(asked, 24)
    counts = [0] * 4

    def work(place: int) -> None:
        study = optuna.load_study(storage=open_storage(url), study_name="s")
        while (trial := claim(study)) is not None:
            study.tell(trial, float(place))
            counts[place] += 1

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(counts) == 24
    asked = optuna.load_study(storage=open_storage(url), study_name="s")
    assert [trial.state for trial in asked.trials] == [TrialState.COMPLETE] * 24


def test_a_trial_whose_process_is_gone_is_failed_and_put_back(study: optuna.Study) -> None:
    ask_for(study, 1, [{"x": 3}])
    trial = claim(study)
    assert trial is not None
    trial.suggest_int("x", 0, 9)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    trial.set_user_attr(WORKER, {"host": socket.gethostname(), "pid": gone.pid, "started": 0.0})

    assert take_back_lost(study) == 1
    lost, again = study.trials
    assert (lost.state, again.state) == (TrialState.FAIL, TrialState.WAITING)
    assert again.user_attrs[RETRY_OF] == 0
    retried = claim(study)
    assert retried is not None
    assert retried.suggest_int("x", 0, 9) == 3


def test_a_trial_that_was_lost_twice_is_not_put_back(study: optuna.Study) -> None:
    study.enqueue_trial({}, user_attrs={RETRY_OF: 0})
    trial = claim(study)
    assert trial is not None
    trial.set_user_attr(WORKER, {"host": socket.gethostname(), "pid": os.getpid(), "started": 0.0})

    assert take_back_lost(study) == 0
    assert [each.state for each in study.trials] == [TrialState.FAIL]


def test_trials_of_living_workers_and_of_other_machines_are_left_alone(study: optuna.Study) -> None:
    ask_for(study, 2)
    claim(study)
    other = claim(study)
    assert other is not None
    other.set_user_attr(WORKER, {"host": "elsewhere", "pid": 1, "started": 0.0})

    assert take_back_lost(study) == 0
    assert [each.state for each in study.trials] == [TrialState.RUNNING] * 2


def test_a_trial_of_another_machine_whose_heart_stops_is_failed_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "HEARTBEAT_S", 1)
    monkeypatch.setattr(storage, "GRACE_S", 2)
    study = optuna.create_study(storage=open_storage(f"sqlite:///{tmp_path}/s.db"))
    trial = claim_elsewhere(study)
    with Heartbeat(study) as heartbeat, heartbeat.of(trial):
        assert take_back_lost(study) == 0  # it has just begun
    wait_until(lambda: take_back_lost(study) == 1)
    lost, again = study.trials

    assert (lost.state, again.state) == (TrialState.FAIL, TrialState.WAITING)
    assert again.user_attrs[RETRY_OF] == lost.number
    retried = claim(study)
    assert retried is not None
    assert retried.suggest_int("x", 0, 9) == 3


def test_a_heart_that_beats_keeps_a_trial_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT_S", 0.05)
    url = f"sqlite:///{tmp_path}/s.db"
    study = optuna.create_study(storage=open_storage(url))

    def is_stale() -> bool:
        return bool(study._storage._get_stale_trial_ids(study._study_id))  # type: ignore[attr-defined]

    trial = claim_elsewhere(study)
    with Heartbeat(study) as heartbeat, heartbeat.of(trial):
        age_heartbeats(tmp_path / "s.db")
        wait_until(lambda: not is_stale())
        assert take_back_lost(study) == 0
    age_heartbeats(tmp_path / "s.db")

    assert take_back_lost(study) == 1


def test_a_journal_keeps_no_heartbeats_so_trials_of_other_machines_are_left_alone(tmp_path: Path) -> None:
    study = optuna.create_study(storage=open_storage(f"journal:///{tmp_path}/s.log"))
    with Heartbeat(study) as heartbeat, heartbeat.of(claim_elsewhere(study)):
        pass

    assert take_back_lost(study) == 0
    assert [each.state for each in study.trials] == [TrialState.RUNNING]


def claim_elsewhere(study: optuna.Study) -> optuna.Trial:
    """A trial with x = 3, claimed by a worker of another machine."""
    ask_for(study, 1, [{"x": 3}])
    trial = claim(study)
    assert trial is not None
    trial.suggest_int("x", 0, 9)
    trial.set_user_attr(WORKER, {"host": "elsewhere", "pid": 1, "started": 0.0})
    return trial


def age_heartbeats(database: Path) -> None:
    """Have every heartbeat be a minute old."""
    with sqlite3.connect(database, timeout=60) as connection:
        connection.execute("update trial_heartbeats set heartbeat = datetime('now', '-60 seconds')")
    connection.close()


def test_an_interrupted_trial_is_failed_and_another_waits(study: optuna.Study) -> None:
    ask_for(study, 1)
    trial = claim(study)
    assert trial is not None
    put_back(study, trial)

    assert sorted(each.state.name for each in study.trials) == ["FAIL", "WAITING"]
