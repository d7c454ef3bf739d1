from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.core.errors import ConfigError
from autopipe.core.trace import TraceEvent, write_trace
from autopipe.plots import plot_agreement, plot_latency, plot_predictions, plot_timeline
from tests.profile.samples import sample_profile

REPORT = {
    "predictions": [
        {"strategy": "chain", "measured_ms_per_token": 10.0, "predicted_ms_per_token": 11.0},
        {"strategy": "async-chain", "measured_ms_per_token": 20.0, "predicted_ms_per_token": 19.0},
    ]
}
PNG = b"\x89PNG"


@pytest.fixture
def trace(tmp_path: Path) -> dict:
    lanes = {
        "small": [TraceEvent("draft", 0, 1_000_000, 1, 0), TraceEvent("roll back", 3_000_000, 3_000_000, 2, 0)],
        "big": [TraceEvent("prefill", 0, 500_000, 9, 0), TraceEvent("verify", 1_000_000, 3_000_000, 4, 1)],
    }
    write_trace(tmp_path / "trace.json", lanes)
    return json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.parametrize("draw", [plot_latency, plot_agreement])
def test_a_profile_becomes_a_picture(tmp_path: Path, draw) -> None:
    assert draw(sample_profile(), tmp_path / "p.png").read_bytes().startswith(PNG)


def test_predictions_become_a_picture(tmp_path: Path) -> None:
    assert plot_predictions(REPORT, tmp_path / "p.png").read_bytes().startswith(PNG)


def test_a_trace_becomes_a_picture(tmp_path: Path, trace: dict) -> None:
    assert plot_timeline(trace, tmp_path / "p.png").read_bytes().startswith(PNG)


def test_a_vector_picture_names_the_stages_and_what_they_did(tmp_path: Path, trace: dict) -> None:
    text = plot_timeline(trace, tmp_path / "p.svg").read_text()

    for word in ("small", "big", "verify", "roll back", "rejected"):
        assert f"<!-- {word} -->" in text


def test_a_stretch_leaves_out_what_is_outside(tmp_path: Path, trace: dict) -> None:
    text = plot_timeline(trace, tmp_path / "p.svg", length_ms=0.9).read_text()

    assert "<!-- verify -->" not in text


def test_a_stretch_without_events_is_refused_with_the_length_of_the_trace(tmp_path: Path, trace: dict) -> None:
    with pytest.raises(ConfigError, match="0 to 3 ms"):
        plot_timeline(trace, tmp_path / "p.png", start_ms=100)


@pytest.mark.parametrize("data", [{}, {"traceEvents": []}, {"traceEvents": [1]}])
def test_what_is_no_trace_is_refused(tmp_path: Path, data: dict) -> None:
    with pytest.raises(ConfigError, match="TRACE"):
        plot_timeline(data, tmp_path / "p.png")


@pytest.mark.parametrize("data", [{}, {"predictions": []}, {"predictions": [{"measured_ms_per_token": 1}]}])
def test_what_is_no_fit_report_is_refused(tmp_path: Path, data: dict) -> None:
    with pytest.raises(ConfigError, match="simulate fit"):
        plot_predictions(data, tmp_path / "p.png")


def test_an_ending_that_is_no_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg"):
        plot_predictions(REPORT, tmp_path / "p.txt")


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--out"):
        plot_predictions(REPORT, tmp_path / "none" / "p.png")
