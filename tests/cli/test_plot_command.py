from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.core.trace import TraceEvent, write_trace
from tests.plots.test_plots import REPORT
from tests.profile.samples import sample_profile


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.json").write_text(sample_profile().model_dump_json())
    (tmp_path / "fit.json").write_text(json.dumps(REPORT))
    write_trace(tmp_path / "trace.json", {"big": [TraceEvent("decode", 0, 1_000_000, 1, 0)]})
    return tmp_path


@pytest.mark.parametrize(
    ("plot", "source"),
    [
        ("latency", "profile.json"),
        ("agreement", "profile.json"),
        ("predictions", "fit.json"),
        ("timeline", "trace.json"),
    ],
)
def test_each_plot_writes_a_picture_and_says_where(invoke, files: Path, plot: str, source: str) -> None:
    result = invoke("plot", plot, source)

    name = f"{source.removesuffix('.json')}-{plot}.png"
    assert result.stdout.strip() == name
    assert (files / name).stat().st_size > 1000


def test_out_names_the_picture(invoke, files: Path) -> None:
    invoke("plot", "latency", "profile.json", "--out", "mine.svg")

    assert "<svg" in (files / "mine.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["latency", "nowhere.json"], "--profile"),
        (["latency", "fit.json"], "schema_version"),
        (["predictions", "profile.json"], "predictions"),
        (["timeline", "fit.json"], "TRACE"),
        (["timeline", "trace.json", "--length-ms", "0"], "--length-ms"),
        (["latency", "profile.json", "--out", "mine.txt"], "--out"),
    ],
)
def test_a_wrong_file_or_option_is_named(invoke, files: Path, arguments: list[str], named: str) -> None:
    result = invoke("plot", *arguments)

    assert result.exit_code == 2
    assert named in result.stderr
