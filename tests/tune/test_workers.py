"""Workers of a search, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import optuna
import psutil
import pytest

from autopipe.tune.search import open_study, prepare
from autopipe.tune.storage import open_storage
from autopipe.tune.workers import Workers
from tests.profile.samples import sample_profile
from tests.tune.scenes import settings, space, wait_until

HELP = "import sys; from tests.tune.test_workers import help_with; help_with(1, sys.argv[1], endless=True)"


def help_with(count: int, url: str, *, endless: bool = False) -> int:
    """Have workers run a study's trials; how many of them failed."""
    helpers = Workers(
        count,
        storage_url=url,
        study_name="s",
        space=space(),
        profile=sample_profile(),
        power=None,
        settings=settings(),
        endless=endless,
        deadline_s=time.monotonic() + 1000,
    )
    with helpers:
        return helpers.wait()


def new_study(url: str, count: int) -> optuna.Study:
    study = open_study(open_storage(url), "s", settings())
    prepare(study, space(), count)
    return study


@pytest.mark.parametrize("url", ["sqlite:///{}/s.db", "journal:///{}/s.log"])
def test_workers_run_exactly_what_was_asked_in_any_storage(tmp_path: Path, url: str) -> None:
    url = url.format(tmp_path)
    new_study(url, 16)

    assert help_with(2, url) == 0
    trials = optuna.load_study(storage=open_storage(url), study_name="s").trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 16
    assert os.getpid() not in {trial.user_attrs["worker"]["pid"] for trial in trials}


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    study = new_study(url, 1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", HELP, url], env=environment)
    try:
        wait_until(lambda: any(trial.state.is_finished() for trial in study.get_trials()))
        (worker,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()

    try:
        wait_until(lambda: has_ended(worker))
    finally:
        if not has_ended(worker):
            worker.kill()


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or only its exit code is left for whoever adopted it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
