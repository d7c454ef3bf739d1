"""Published runs: reading, filtering, fitting, predicting."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopipe.core.errors import ConfigError
from autopipe.envs.simulator import LatencyCurve, PairTimes, fit_traces, simulate_async_pair, simulate_sync_pair
from autopipe.envs.simulator.fit import fit_agreement
from autopipe.envs.simulator.traces import read_traces

PUBLISHED = Path(__file__).parents[4] / "shared" / "traces" / "pipespec_a100_humaneval.jsonl.gz"
MODELS = ["small", "large"]
TIMES = PairTimes(0.0115, LatencyCurve({1: 0.0215, 2: 0.026, 10: 0.027}))


def _texts(seed: int = 0) -> list[list[bool]]:
    rng = np.random.default_rng(seed)
    return [(rng.random(length) < 0.93).tolist() for length in (200, 300, 250)]


def _run(strategy: str, lookahead: int, texts: Sequence[Sequence[bool]]) -> dict[str, Any]:
    simulate = simulate_async_pair if strategy == "async-chain" else simulate_sync_pair
    samples = []
    for index, agrees in enumerate(texts):
        result = simulate(agrees, lookahead, TIMES)
        verify_s = TIMES.verify.seconds(max(lookahead, 1))
        samples.append(
            {
                "tokens_generated": len(agrees),
                "total_time_s": result.total_s + (1.0 if index == 0 else 0.05),
                "model_times_s": [
                    [TIMES.draft_s] * result.draft_steps,
                    [verify_s] * len(result.accepted_tokens),
                ],
                "accepted_tokens": [[*result.accepted_tokens, 0]],
                "gpu": [],
            }
        )
    return {"strategy": strategy, "models": MODELS, "lookahead": lookahead, "samples": samples}


def _plain() -> dict[str, Any]:
    sample = {"tokens_generated": 100, "total_time_s": 2.2, "token_times_s": [0.0215] * 100}
    return {"strategy": "greedy", "models": ["large"], "lookahead": 0, "samples": [sample]}


def _write(path: Path, runs: Sequence[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("\n".join(json.dumps(run) for run in runs).encode()))
    return path


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    texts = _texts()
    runs = [_run(strategy, lookahead, texts) for strategy in ("chain", "async-chain") for lookahead in (2, 4, 8)]
    return _write(tmp_path / "traces.jsonl.gz", [_plain(), *runs])


def test_other_runs_are_predicted_from_the_fitted_ones(traces: Path) -> None:
    report = fit_traces(traces, ["lookahead=2,8"])
    assert [(each.strategy, each.lookahead) for each in report.predictions] == [("chain", 4), ("async-chain", 4)]
    assert report.worst_error < 0.03


def test_predicted_run_has_no_part_in_its_prediction(traces: Path, tmp_path: Path) -> None:
    runs = [json.loads(line) for line in gzip.decompress(traces.read_bytes()).decode().splitlines()]
    for run in runs:
        if run["lookahead"] == 4:
            for sample in run["samples"]:
                sample["total_time_s"] *= 3
                sample["model_times_s"] = [[9.0], [9.0]]
                sample["accepted_tokens"] = [[1]]
    changed = _write(tmp_path / "changed.jsonl.gz", runs)
    before = fit_traces(traces, ["lookahead=2,8"]).predictions
    after = fit_traces(changed, ["lookahead=2,8"]).predictions
    assert [each.predicted_ms_per_token for each in before] == [each.predicted_ms_per_token for each in after]


def test_disagreements_are_recovered_from_acceptance_sequences(traces: Path) -> None:
    runs = [run for run in read_traces(traces) if run.lookahead in (2, 8)]
    wrong = 0
    for index, agrees in enumerate(_texts()):
        fitted = fit_agreement(runs, index, len(agrees))
        wrong += sum(mine != true for mine, true in zip(fitted, agrees, strict=True))
    assert wrong / 750 < 0.01


def test_predict_filter_alone_fits_on_all_other_runs(traces: Path) -> None:
    report = fit_traces(traces, predict=["strategy=chain", "lookahead=4"])
    assert [(each.strategy, each.lookahead) for each in report.predictions] == [("chain", 4)]
    assert len(report.fitted) == 6


def test_without_filters_each_run_is_predicted_from_the_others(traces: Path) -> None:
    assert len(fit_traces(traces).predictions) == 6


def test_runs_of_three_models_are_named_and_left_out(traces: Path, tmp_path: Path) -> None:
    runs = [json.loads(line) for line in gzip.decompress(traces.read_bytes()).splitlines()]
    three = {**runs[1], "models": ["tiny", *MODELS], "lookahead": 4}
    report = fit_traces(_write(tmp_path / "three.jsonl.gz", [*runs, three]), ["lookahead=2,8"]).as_dict()
    assert report["left_out"] == [f"chain tiny+{'+'.join(MODELS)} lookahead 4"]
    assert report["predictions"] == fit_traces(traces, ["lookahead=2,8"]).as_dict()["predictions"]


def test_report_has_the_documented_keys(traces: Path) -> None:
    report = fit_traces(traces, ["lookahead=2,8"]).as_dict()
    first = report["predictions"][0]
    assert set(first) == {
        "strategy", "models", "lookahead", "measured_ms_per_token", "predicted_ms_per_token", "error"
    }  # fmt: skip
    assert first["error"] == pytest.approx(first["predicted_ms_per_token"] / first["measured_ms_per_token"] - 1)


@pytest.mark.parametrize("text", ["lookahead", "colour=red", "lookahead=", "lookahead=two", "strategy=fast"])
def test_bad_filter_is_refused_with_its_option(traces: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="--fit-on"):
        fit_traces(traces, [text])


def test_nothing_left_to_predict_is_an_error(traces: Path) -> None:
    with pytest.raises(ConfigError, match="--predict"):
        fit_traces(traces, ["lookahead=2,4,8"])


def test_strategy_without_a_fitted_run_is_an_error(traces: Path) -> None:
    with pytest.raises(ConfigError, match="--fit-on"):
        fit_traces(traces, ["strategy=chain"], ["strategy=async-chain"])


def test_unreadable_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(_plain()) + '\n{"strategy": "chain"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_traces(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
        read_traces(tmp_path / "nowhere.jsonl")


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published runs are not beside this checkout")
def test_published_runs_are_predicted_within_five_percent_median_and_ten_worst() -> None:
    report = fit_traces(PUBLISHED, ["lookahead=2,8"])
    assert len(report.predictions) == 7
    assert report.median_error <= 0.05
    assert report.worst_error <= 0.10
