from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.profile.samples import sample_profile

EMULATED = """
mode: lockstep
chain:
  - {model: emulated, name: small, window: 4, emulated: {ms: {1: 1}, agreement: 0.8}}
  - {model: emulated, name: big, emulated: {ms: {1: 10, 2: 12}}}
"""


@pytest.fixture
def emulated(tmp_path: Path) -> str:
    (tmp_path / "emulated.yaml").write_text(EMULATED)
    return str(tmp_path / "emulated.yaml")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    (tmp_path / "profile.json").write_text(sample_profile().model_dump_json())
    return str(tmp_path / "profile.json")


@pytest.fixture
def traces(tmp_path: Path) -> str:
    """A run of plain decoding and three of a pair, whose steps take what they take."""
    sample = {"tokens_generated": 4, "total_time_s": 0.4, "token_times_s": [0.1] * 4}
    runs = [{"strategy": "greedy", "models": ["big"], "lookahead": 0, "samples": [sample]}]
    for lookahead in (2, 4, 8):
        pair = {
            "tokens_generated": 6,
            "total_time_s": 0.3 + 0.01 * lookahead,
            "model_times_s": [[0.01] * 8, [0.12] * 3],
            "accepted_tokens": [[2, 2, 2]],
        }
        runs.append({"strategy": "chain", "models": ["small", "big"], "lookahead": lookahead, "samples": [pair]})
    path = tmp_path / "traces.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, runs)).encode()))
    return str(path)


def test_emulated_plans_need_no_profile(invoke, emulated: str) -> None:
    result = invoke("simulate", "--plan", emulated, "--output-tokens", "50", "--json")

    found = json.loads(result.stdout)
    assert found["plan"]["tokens"] == 50
    assert found["speedup"] > 1


def test_the_same_seed_gives_the_same_result(invoke, emulated: str) -> None:
    first, second = (invoke("simulate", "--plan", emulated, "--json", "--seed", "3").stdout for _ in range(2))

    assert first == second


def test_a_profile_stands_for_real_models(invoke, tmp_path: Path, profile: str) -> None:
    (tmp_path / "plan.yaml").write_text(
        "chain: [{model: ngram, window: 7}, {model: acme/big, dtype: bf16, threads: 2}]"
    )
    result = invoke("simulate", "--profile", profile, "--plan", str(tmp_path / "plan.yaml"), "--json")

    assert json.loads(result.stdout)["plan"]["tokens"] == 32


def test_the_table_says_how_much_faster(invoke, emulated: str) -> None:
    result = invoke("simulate", "--plan", emulated)

    assert "times as fast as plain decoding" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--plan", "nowhere.yaml"], "--plan"),
        (["--seed", "1"], "--plan"),
        (["--plan", "EMULATED", "--kind", "code"], "--kind"),
        (["--plan", "EMULATED", "--requests", "0"], "--requests"),
        (["--plan", "EMULATED", "--output-tokens", "0"], "--output-tokens"),
        (["--plan", "EMULATED", "--profile", "nowhere.json"], "--profile"),
    ],
)
def test_a_bad_option_is_named_and_exits_with_2(invoke, emulated: str, arguments: list[str], named: str) -> None:
    result = invoke("simulate", *(emulated if each == "EMULATED" else each for each in arguments))

    assert result.exit_code == 2
    assert named in result.stderr


def test_real_models_without_a_profile_are_refused(invoke, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("chain: [{model: acme/big}]")
    result = invoke("simulate", "--plan", str(tmp_path / "plan.yaml"))

    assert result.exit_code == 2
    assert "autopipe profile" in result.stderr


def test_fit_predicts_what_was_not_fitted(invoke, traces: str) -> None:
    result = invoke("simulate", "fit", traces, "--fit-on", "lookahead=2,8", "--json")

    (prediction,) = json.loads(result.stdout)["predictions"]
    assert prediction["lookahead"] == 4
    assert prediction["error"] == pytest.approx(
        prediction["predicted_ms_per_token"] / prediction["measured_ms_per_token"] - 1
    )
    assert set(prediction) == {
        "strategy",
        "models",
        "lookahead",
        "measured_ms_per_token",
        "predicted_ms_per_token",
        "error",
    }


def test_fit_filters_add_up(invoke, traces: str) -> None:
    result = invoke("simulate", "fit", traces, "--predict", "strategy=chain", "--predict", "lookahead=8", "--json")

    assert [each["lookahead"] for each in json.loads(result.stdout)["predictions"]] == [8]


def test_fit_as_a_table_ends_with_the_errors(invoke, traces: str) -> None:
    assert "absolute error: median" in invoke("simulate", "fit", traces, "--fit-on", "lookahead=2,8").stdout


def test_a_bad_filter_is_named(invoke, traces: str) -> None:
    result = invoke("simulate", "fit", traces, "--fit-on", "colour=red")

    assert result.exit_code == 2
    assert "--fit-on" in result.stderr


def test_without_arguments_the_help_teaches(invoke) -> None:
    assert "autopipe simulate fit traces.jsonl.gz" in invoke("simulate").output
