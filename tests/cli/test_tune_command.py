from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from autopipe.cli.tune_command import parse_memory_limits

PLAN = """
chain:
  - {model: emulated, name: small, emulated: {ms: {1: 1}, agreement: 0.5}}
  - {model: emulated, name: big, emulated: {ms: {1: 2}}}
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chain.yaml").write_text(PLAN)
    return tmp_path / "chain.yaml"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--budget", "soon"], "--budget"),
        (["--objective", "fame"], "--objective"),
        (["--sampler", "magic"], "--sampler"),
        (["--workload", "nosuch.jsonl"], "--workload"),
        (["--trials", "-1"], "--trials"),
        (["--workers", "2"], "--workers"),
        (["--workers", "0", "--storage", "sqlite:///s.db"], "--workers"),
        (["--storage", "s.db"], "--storage"),
        (["--study-name", " "], "--study-name"),
        (["--memory-share", "2"], "--memory-share"),
        (["--memory-limit", "cpu"], "--memory-limit"),
        (["--memory-limit", "cpu=-1"], "--memory-limit"),
        (["--max-ttft-ms", "0"], "--max-ttft-ms"),
        (["--max-new-tokens", "1"], "--max-new-tokens"),
        (["--drafter", "small,window=3"], "--drafter"),
        (["--precision", "int3"], "--precision"),
        (["--table", "nosuch.safetensors"], "--table"),
        (["--out", "/no/such/folder/plan.yaml"], "--out"),
        (["--target", "/no/such/model"], "--target"),
    ],
)
def test_bad_options_are_named_before_anything_loads(
    plan: Path, invoke: Callable[..., Result], arguments: list[str], key: str
) -> None:
    given = [] if key == "--target" else ["--plan", str(plan)]
    result = invoke("tune", *given, *arguments)

    assert result.exit_code == 2
    assert key in result.output
    assert not (plan.parent / "plan.yaml").exists()


def test_the_plan_that_is_read_is_not_overwritten(plan: Path, invoke: Callable[..., Result]) -> None:
    result = invoke("tune", "--plan", str(plan), "--out", str(plan))

    assert result.exit_code == 2
    assert plan.read_text() == PLAN


def test_help_teaches_with_examples(invoke: Callable[..., Result]) -> None:
    text = invoke("tune", "--help").output

    assert "autopipe tune --budget 5m" in text
    assert "optuna-dashboard" in text


def test_memory_limits_are_gib_by_device() -> None:
    assert parse_memory_limits(["cpu=1.5", "cuda:0=20"]) == {"cpu": 3 << 29, "cuda:0": 20 << 30}
