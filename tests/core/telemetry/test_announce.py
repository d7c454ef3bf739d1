"""Engines that announce themselves to `autopipe top`."""

from __future__ import annotations

import gc
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopipe.core.plan import Plan
from autopipe.core.stats import StageReport
from autopipe.core.telemetry.announce import Announcer
from autopipe.core.telemetry.pipelines import running_pipelines
from autopipe.core.telemetry.runtime_folder import make_private, runtime_folder
from autopipe.core.telemetry.tally import Tally

STAGE = {"model": "emulated", "emulated": {"ms": {1: 1}}}
PLAN = Plan.parse({"mode": "async", "chain": [{**STAGE, "name": "small", "window": 8}, {**STAGE, "name": "big"}]})


class PretendEngine:
    """Says what a test tells it to."""

    def __init__(self, plan: Plan = PLAN) -> None:
        self.plan = plan
        self.num_tokens = self.num_waiting = 0
        self.reports: tuple[int, list[StageReport]] | None = None

    def progress(self) -> tuple[int, list[StageReport]] | None:
        return self.reports


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "running"


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def announced(engine: PretendEngine, folder: Path) -> Announcer:
    announcer = Announcer(engine, folder=folder)
    wait_for(lambda: running_pipelines(folder), "nothing is announced")
    return announcer


def test_a_running_engine_is_found_and_a_closed_one_is_not(folder: Path) -> None:
    engine = PretendEngine()
    announcer = announced(engine, folder)
    (view,) = running_pipelines(folder)
    assert (view.plan, view.pid, view.busy) == ("async: small 8 > big", os.getpid(), False)
    assert view.age_s is not None
    assert view.silent_s is not None
    announcer.close()
    announcer.close()
    assert not list(folder.iterdir())


def test_file_and_folder_are_for_the_user_alone(folder: Path) -> None:
    engine = PretendEngine()
    announcer = announced(engine, folder)
    (file,) = folder.glob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    announcer.close()


def test_a_folder_that_others_could_read_is_closed_to_them(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_link_in_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not a folder"):
        make_private(folder)


def test_an_engine_goes_on_where_nothing_can_be_announced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Announcer(PretendEngine(), folder=tmp_path / "file").close()


def test_an_abandoned_engine_is_collected_and_its_file_removed(folder: Path) -> None:
    engine = PretendEngine()
    announced(engine, folder)
    del engine
    gc.collect()
    wait_for(lambda: not list(folder.iterdir()), "the file is still there")


def announcement(folder: Path, **changes: object) -> Path:
    engine = PretendEngine()
    announcer = announced(engine, folder)
    (file,) = folder.glob("*.json")
    data = json.loads(file.read_text())
    announcer.close()
    data["pipeline"] |= changes.pop("pipeline", {})  # type: ignore[operator]
    file.write_text(json.dumps({**data, **changes}))
    return file


def test_a_dead_process_is_ignored_and_its_file_removed_after_a_minute(folder: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    file = announcement(folder, pipeline={"pid": dead.pid})
    assert running_pipelines(folder) == []
    assert file.exists()
    file.write_text(json.dumps({**json.loads(file.read_text()), "updated_at": time.time() - 100}))
    assert running_pipelines(folder) == []
    assert not file.exists()


def test_another_process_with_the_number_of_a_dead_one_is_not_taken_for_it(folder: Path) -> None:
    announcement(folder, process_started_at=1.0)
    assert running_pipelines(folder) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', '{"version": 99}'])
def test_files_that_cannot_be_understood_are_skipped(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "pipeline-1-0.json").write_text(content)
    assert running_pipelines(folder) == []


def test_a_named_pipe_in_the_folder_does_not_block(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "pipeline-1-0.json")
    assert running_pipelines(folder) == []


def test_the_folder_may_be_named_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPIPE_RUNTIME_DIR", str(tmp_path))
    assert runtime_folder() == tmp_path
    assert running_pipelines() == []


def reports(forwards: int, busy_s: float, proposed: int, accepted: int) -> list[StageReport]:
    small = StageReport(
        "small", forwards=4 * forwards, proposed=proposed, accepted=accepted, rollbacks=2, busy_s=busy_s
    )
    return [small, StageReport("big", forwards=forwards, emitted=3 * forwards, busy_s=busy_s)]


def test_rates_are_of_the_time_between_two_looks() -> None:
    times = iter([0.0, 1.0])
    tally, engine = Tally(now=lambda: next(times)), PretendEngine()
    engine.reports = (1, reports(11, 0.5, 30, 30))
    tally.look(engine)
    engine.reports, engine.num_tokens = (1, reports(21, 1.1, 70, 50)), 25
    view = tally.look(engine)
    small, big = view.stages
    assert (view.tokens_per_s, view.acceptance_length, view.busy) == (25.0, 3.0, True)
    assert (small.acceptance_rate, small.window_fill, small.window) == (0.5, 4.0, 8)
    assert (small.num_rollbacks, big.num_rollbacks) == (2, None)
    assert big.busy_share == pytest.approx(0.6)
    assert big.step_ms == pytest.approx(60.0)


def test_a_new_request_counts_from_its_beginning() -> None:
    times = iter([0.0, 1.0, 2.0])
    tally, engine = Tally(now=lambda: next(times)), PretendEngine()
    engine.reports = (1, reports(11, 0.5, 40, 40))
    tally.look(engine)
    engine.reports = (2, reports(6, 0.25, 10, 10))
    assert tally.look(engine).stages[0].window_fill == 2.0  # the prompt's forward has no drafts
    engine.reports = (2, reports(11, 0.5, 20, 20))
    assert tally.look(engine).stages[0].window_fill == 2.0


def test_an_idle_engine_has_no_rates_but_its_plan() -> None:
    view = Tally().look(PretendEngine())
    assert (view.plan, view.tokens_per_s, view.acceptance_length) == ("async: small 8 > big", None, None)
    assert [stage.acceptance_rate for stage in view.stages] == [None, None]
