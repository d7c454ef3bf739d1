"""The whole of it, on emulated stages: seconds instead of minutes, and what must come out is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

import autopipe
from autopipe.core.errors import ConfigError
from autopipe.core.plan import Mode, Plan, StagePlan
from autopipe.profile.identity import describe_machine
from autopipe.tune import TuneResult, decide
from autopipe.tune.plan_file import plan_text
from autopipe.tune.search import Callback, open_study
from autopipe.tune.storage import open_storage
from tests.tune.conftest import Measured
from tests.tune.scenes import EMULATED, settings, wait_until

QUICK: dict[str, Any] = {"budget": "1h", "max_new_tokens": 12, "num_trials": 24}


@pytest.fixture(scope="module")
def folder(measured: Measured) -> Path:
    """Prompts, and a cache that has their profile."""
    return measured.folder


@pytest.fixture(autouse=True)
def own_cache(folder: Path, little_effort: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPIPE_CACHE", str(folder / "cache"))


@pytest.fixture(scope="module")
def tuned(folder: Path) -> TuneResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPIPE_CACHE", str(folder / "cache"))
        return autopipe.tune(
            Plan.parse(EMULATED),
            workload=str(folder / "mine.jsonl"),
            out=folder / "plan.yaml",
            report=folder / "report.html",
            **QUICK,
        )


def test_a_drafter_that_pays_is_chosen(tuned: TuneResult) -> None:
    assert tuned.helps
    assert tuned.plan.drafters
    assert tuned.winner is not None
    assert tuned.winner.speedup is not None
    assert tuned.winner.speedup > 1


def test_exactly_the_trials_asked_were_run(tuned: TuneResult) -> None:
    assert tuned.study is not None
    assert [trial.state.name for trial in tuned.study.trials] == ["COMPLETE"] * 24


def test_the_plan_file_says_why_and_can_be_used(tuned: TuneResult, folder: Path) -> None:
    text = (folder / "plan.yaml").read_text()
    plan = Plan.load(folder / "plan.yaml")

    assert plan == tuned.plan
    assert plan.tuned is not None
    assert plan.tuned.measured["speedup"] == pytest.approx(tuned.speedup, rel=1e-3)
    assert text.startswith("# ")
    assert tuned.reason.split(",")[0] in " ".join(text.replace("# ", "").split())
    with autopipe.AutoPipe.from_plan(folder / "plan.yaml") as pipe:
        fast = pipe.generate("abc", max_new_tokens=12).token_ids
        pipe.apply(plan.replace(mode="plain"))
        assert pipe.generate("abc", max_new_tokens=12).token_ids == fast


def test_the_report_needs_no_other_file(tuned: TuneResult, folder: Path) -> None:
    text = (folder / "report.html").read_text()

    assert text.count("data:image/png;base64,") == 5
    assert "src='http" not in text
    assert "<link" not in text
    assert "<script" not in text
    for name in ("history", "importances", "predictions", "front", "timeline"):
        assert tuned.files[name] == folder / f"report-{name}.png"
        assert tuned.files[name].read_bytes().startswith(b"\x89PNG")


def test_the_result_is_ready_for_json(tuned: TuneResult) -> None:
    data = json.loads(json.dumps(tuned.to_dict()))

    assert data["helps"] is True
    assert data["trials"] == {"complete": 24}
    assert data["measured"][0]["verdict"] == "chosen"
    assert set(data["phases_s"]) == {"profile", "search", "live", "report"}


def test_a_profile_that_was_measured_is_not_measured_again(tuned: TuneResult, measured: Measured) -> None:
    assert tuned.profile == measured.profile


def test_where_nothing_helps_it_is_plain_decoding(measured: Measured) -> None:
    dear = {"model": "emulated", "name": "big", "emulated": {"ms": {1: 3, 2: 60}}}  # a single draft costs 19 steps
    result = autopipe.tune(
        Plan.parse({"chain": [EMULATED["chain"][0], dear]}),
        workload=str(measured.folder / "mine.jsonl"),
        check_live=False,
        **QUICK,
    )

    assert not result.helps
    assert result.plan.mode is Mode.PLAIN
    assert len(result.plan.chain) == 1
    assert result.speedup == 1.0
    assert "plain" in plan_text(result)


def test_where_plain_decoding_wins_live_its_plan_has_what_was_measured(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "P_BETTER", 0.0)  # no gain is ever clear
    result = autopipe.tune(Plan.parse(EMULATED), workload=str(measured.folder / "mine.jsonl"), **QUICK)
    best = next(
        each for each in result.measured if each.verdict == "others were better" and f" {each.name}," in result.reason
    )

    assert not result.helps
    assert result.plan.tuned is not None
    assert result.plan.tuned.measured == pytest.approx(
        {
            "ms_per_token": best.plain_ms_per_token,
            "slow_ms_per_token": best.plain_slow_ms_per_token,
            "speedup": 1.0,
            "best_candidate_gain": best.gain,
        },
        rel=1e-3,
    )


def test_a_drafter_that_fails_is_left_out(folder: Path) -> None:
    broken = StagePlan.parse({"model": "emulated", "name": "broken", "emulated": {"ms": {1: 1}, "fail_after": 1}})
    result = autopipe.tune(
        Plan.parse(EMULATED), [broken], workload=str(folder / "mine.jsonl"), check_live=False, **QUICK
    )

    assert any("broken" in note for note in result.notes)
    assert all(stage.name != "broken" for stage in result.plan.chain)


def test_a_budget_too_short_to_measure_leaves_a_valid_plan(folder: Path, tmp_path: Path) -> None:
    result = autopipe.tune(
        Plan.parse(EMULATED),
        workload=str(folder / "mine.jsonl"),
        budget="1s",
        max_new_tokens=13,
        out=tmp_path / "plan.yaml",
    )

    assert not result.helps
    assert Plan.load(tmp_path / "plan.yaml").mode is Mode.PLAIN


def test_memory_that_no_drafter_fits_into_leaves_the_target_alone(folder: Path, tuned: TuneResult) -> None:
    assert tuned.plain_prediction is not None
    room = int(1.2 * tuned.plain_prediction.memory_bytes["cpu"])
    result = autopipe.tune(
        Plan.parse(EMULATED),
        workload=str(folder / "mine.jsonl"),
        memory_limits={"cpu": room},
        check_live=False,
        **QUICK,
    )

    assert all(stage.name != "small" for stage in result.plan.chain)
    assert result.study is not None
    assert any(trial.constraints["memory.cpu"] > 0 for trial in result.study.trials)


def test_pareto_prints_a_front_and_writes_its_plans(folder: Path, tmp_path: Path) -> None:
    result = autopipe.tune(
        Plan.parse(EMULATED),
        workload=str(folder / "mine.jsonl"),
        objective="pareto",
        sampler="nsga2",
        check_live=False,
        out=tmp_path / "plan.yaml",
        **QUICK,
    )

    assert result.front
    assert {len(plan.chain) for plan, _ in result.front} >= {1}  # the target alone takes the least memory
    for place in range(1, len(result.front) + 1):
        path = tmp_path / f"plan-front-{place}.yaml"
        plan, prediction = result.front[place - 1]
        assert Plan.load(path) == plan
        assert "predicted only" in " ".join(path.read_text().replace("# ", "").split())
        assert plan.tuned is not None
        assert plan.tuned.machine == describe_machine()
        assert plan.tuned.predicted["ms_per_token"] == pytest.approx(prediction.ms_per_token, rel=1e-3)
        assert plan.tuned.measured == {}


def test_a_study_about_something_else_is_not_gone_on_with(folder: Path, tuned: TuneResult, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    study = open_study(open_storage(url), "s", settings())
    study.set_user_attr("space", "of other models or prompts")
    options = {**QUICK, "check_live": False, "storage": url, "study_name": "s"}
    for objective in ("throughput", "latency"):
        with pytest.raises(ConfigError, match="--study-name"):
            autopipe.tune(
                Plan.parse(EMULATED), workload=str(folder / "mine.jsonl"), **{**options, "objective": objective}
            )
    assert study.get_trials() == []


def call(
    folder: Path,
    url: str,
    trials: int,
    slow_s: float = 0.0,
    workers: int = 1,
    callbacks: Sequence[Callback] = (),
) -> TuneResult:
    return autopipe.tune(
        Plan.parse(EMULATED),
        workload=str(folder / "mine.jsonl"),
        storage=url,
        study_name="s",
        sampler="random",
        check_live=False,
        callbacks=[lambda *_: time.sleep(slow_s), *callbacks],
        workers=workers,
        **{**QUICK, "num_trials": trials},
    )


CALL = "import sys; from pathlib import Path; from tests.tune.test_run import call; "
CALL += "call(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))"


def start(folder: Path, url: str, trials: int, slow_s: float = 0.0) -> subprocess.Popen[bytes]:
    """The same in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen([sys.executable, "-c", CALL, str(folder), url, str(trials), str(slow_s)], env=environment)


def trials_of(url: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(storage=open_storage(url), study_name="s").get_trials(deepcopy=False)


def test_two_calls_at_once_on_one_study_run_exactly_the_trials_asked(
    folder: Path, tuned: TuneResult, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    calls = [start(folder, url, 15), start(folder, url, 15)]
    assert [each.wait(200) for each in calls] == [0, 0]
    trials = trials_of(url)

    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 30
    assert [trial.number for trial in trials] == list(range(30))
    assert len({trial.user_attrs["worker"]["pid"] for trial in trials}) == 2


def test_workers_of_one_call_share_its_trials(folder: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    told: list[int] = []
    call(
        folder,
        url,
        40,
        slow_s=0.5,  # the second process takes seconds to start
        workers=2,
        callbacks=[lambda _, trial: told.append(trial.number)],
    )
    trials = trials_of(url)

    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 40
    assert len({trial.user_attrs["worker"]["pid"] for trial in trials}) == 2
    assert told == [trial.number for trial in trials if trial.user_attrs["worker"]["pid"] == os.getpid()]


def test_a_killed_call_loses_at_most_the_trial_in_flight(folder: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    killed = start(folder, url, 20, slow_s=0.2)

    def some_done() -> bool:
        try:
            return sum(trial.state.is_finished() for trial in trials_of(url)) >= 5
        except KeyError:
            return False

    wait_until(some_done)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = [trial for trial in trials_of(url) if trial.state.is_finished()]
    assert 5 <= len(done) < 20
    call(folder, url, 0)
    states = [trial.state.name for trial in trials_of(url)]

    assert states.count("COMPLETE") == 20
    assert states.count("FAIL") <= 1
    assert len(states) == 20 + states.count("FAIL")
