from __future__ import annotations

import json
import subprocess
import sys
from subprocess import PIPE

import pytest


def test_once_as_json_is_one_object_about_devices_and_pipelines(invoke, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("AUTOPIPE_RUNTIME_DIR", str(tmp_path / "nobody-here"))
    result = invoke("top", "--once", "--json")

    assert result.exit_code == 0
    assert json.loads(result.stdout)["pipelines"] == []


def test_a_pipeline_of_another_process_is_shown_while_it_runs(invoke, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("AUTOPIPE_RUNTIME_DIR", str(tmp_path / "running"))
    code = (
        "from autopipe import AutoPipe, Plan\n"
        "stage = {'model': 'emulated', 'name': 'big', 'emulated': {'ms': {1: 1}}}\n"
        "with AutoPipe.from_plan(Plan.parse({'chain': [stage], 'mode': 'plain'})) as pipe:\n"
        "    print(len(pipe.generate('hello', max_new_tokens=30).token_ids), flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "30\n"
        (shown,) = _until_shown(invoke)
        assert "big" in invoke("top", "--once").stdout
        other.communicate("\n")
    assert shown["pid"] == other.pid
    assert shown["plan"] == "plain: big"
    assert [stage["name"] for stage in shown["stages"]] == ["big"]
    assert json.loads(invoke("top", "--once", "--json").stdout)["pipelines"] == []


def _until_shown(invoke) -> list[dict]:
    for _ in range(20):
        shown = json.loads(invoke("top", "--once", "--json").stdout)["pipelines"]
        if shown:
            return shown
    raise AssertionError("the pipeline is not shown")


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_an_interval_out_of_range_is_refused(invoke, interval: str) -> None:
    result = invoke("top", "--once", "--interval", interval)

    assert result.exit_code == 2
    assert "--interval" in result.stderr
