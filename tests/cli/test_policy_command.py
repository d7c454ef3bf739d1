from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import Result

from tests.envs.scenes import pipeline, scenario
from tests.policies.test_rl import saved

Invoke = Callable[..., Result]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    made = scenario(
        pipeline=pipeline(drafters=[{"name": "small", "ms": {1: 1.0}, "agreement": {"other": 0.8}}]),
        phases=[{"tokens": 150, "kinds": {"chat": 1}, "output_tokens": {"low": 60, "high": 60}}],
    )
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json")))
    return str(tmp_path / "tiny.yaml")


def test_eval_prints_a_table_with_the_yardsticks_and_draws_a_picture(invoke: Invoke, tiny: str, tmp_path: Path) -> None:
    picture = tmp_path / "eval.png"
    result = invoke(
        "policy", "eval", "--policies", "rules", "--scenarios", tiny, "--seeds", "1", "--plot", str(picture)
    )
    assert result.exit_code == 0, result.output
    for word in ("stationary", "oracle", "static: small", "off", "rules", "regret"):
        assert word in result.output
    assert picture.stat().st_size > 1000


def test_eval_json_has_every_figure(invoke: Invoke, tiny: str) -> None:
    result = invoke("policy", "eval", "--policies", "bandit", "--scenarios", tiny, "--seeds", "2", "--json")
    rows = {row["policy"]: row for row in json.loads(result.stdout)["rows"]}
    assert set(rows) == {"oracle", "static", "off", "bandit"}
    assert set(rows["bandit"]["of_oracle"]) == {"mean", "low", "high"}
    assert rows["bandit"]["seeds"] == 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--policies", "clever"), "bandit"),
        (("--scenarios", "nowhere"), "heldout"),
        (("--seeds", "0"), "--seeds"),
        (("--live", "--rounds", "0"), "--rounds"),
    ],
)
def test_eval_refuses_what_it_does_not_know(invoke: Invoke, arguments: tuple[str, ...], word: str) -> None:
    result = invoke("policy", "eval", *arguments)
    assert result.exit_code == 2
    assert word in result.output


def test_inspect_tells_what_a_policy_is(invoke: Invoke, tmp_path: Path) -> None:
    facts = json.loads(invoke("policy", "inspect", str(saved(tmp_path)), "--json").stdout)
    assert facts["algorithm"] == "maskable-ppo"
    assert facts["bytes"] > 0
    assert "maskable-ppo" in invoke("policy", "inspect", str(tmp_path)).output


def test_inspect_refuses_what_is_no_policy(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("policy", "inspect", str(tmp_path))
    assert result.exit_code == 2
    assert "policy.json" in result.output


def test_export_needs_a_run(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("policy", "export", str(tmp_path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "checkpoint" in result.output


@pytest.mark.parametrize("option", [("--algorithm", "dqn"), ("--scenarios", "nowhere"), ("--envs", "0")])
def test_train_refuses_what_it_does_not_know(invoke: Invoke, tmp_path: Path, option: tuple[str, str]) -> None:
    result = invoke("policy", "train", "--out", str(tmp_path / "run"), *option)
    assert result.exit_code == 2
    assert option[0] in result.output
