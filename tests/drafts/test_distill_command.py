"""`autopipe drafts distill`, and how its drafters are named on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopipe.cli.app import app
from autopipe.cli.distill_command import parse_layers
from autopipe.cli.options import PlanOptions, build_plan
from autopipe.core.errors import ConfigError
from tests.drafts.distilling import tiny_answers, tiny_target


@pytest.mark.parametrize(
    ("text", "layers"), [("0-3", (0, 1, 2, 3)), ("0,1,2,29", (0, 1, 2, 29)), ("5", (5,)), ("0-1,28-29", (0, 1, 28, 29))]
)
def test_layers_are_numbers_and_ranges(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "1-", "-2", "3-1", "0;1"])
def test_other_layers_name_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--layers"):
        parse_layers(text)


def test_trains_and_says_where_the_drafter_is(tmp_path: Path) -> None:
    target, answers = tiny_target(tmp_path / "target"), tiny_answers(tmp_path / "answers", num_answers=8, length=12)
    options = ["--target", str(target), "--layers", "0,1", "--rank", "4", "--head", "64", "--tokens", "500"]
    options += ["--batch-tokens", "256", "--answers", str(answers), "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, ["drafts", "distill", *options])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.strip().splitlines()[-1])
    assert said["trained_tokens"] >= 500
    assert (Path(said["drafter"]) / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    "bad",
    [
        ("--learning-rate", "-1"),
        ("--layers", "x"),
        ("--rank", "0"),
        ("--cooldown", "2"),
        ("--optimizer", "sgd"),
        ("--threads", "0"),
        ("--answers", "/nowhere"),
    ],
    ids=lambda bad: bad[0],
)
def test_a_bad_option_names_itself(bad: tuple[str, str], tmp_path: Path) -> None:
    options = ["drafts", "distill", "--answers", str(tmp_path), "--out", str(tmp_path / "out"), "--head", "64", *bad]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert f"{bad[0]}:" in result.stderr


@pytest.mark.parametrize(
    "beside", [("--rank", "8"), ("--layers", "0"), ("--head", "64"), ("--lora-head",), ("--start", "copy")]
)
def test_a_drafter_to_begin_with_has_its_own_shape(beside: tuple[str, ...], tmp_path: Path) -> None:
    options = ["--from", "smollm2-135m", *beside, "--answers", str(tmp_path), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["drafts", "distill", *options])
    assert result.exit_code == 2
    assert f"{beside[0]}:" in result.stderr
    assert "--from" in result.stderr


def test_a_drafter_to_begin_with_that_is_not_there_names_the_option(tmp_path: Path) -> None:
    options = ["--from", "nowhere", "--answers", str(tmp_path), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["drafts", "distill", *options])
    assert result.exit_code == 2
    assert "--from: 'nowhere'" in result.stderr


def test_lora_on_the_head_starts_from_a_copy(tmp_path: Path) -> None:
    options = ["--lora-head", "--start", "lens", "--answers", str(tmp_path), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["drafts", "distill", *options])
    assert result.exit_code == 2
    assert "--start:" in result.stderr


def test_a_folder_without_answers_names_the_option(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    options = ["--target", str(target), "--layers", "0", "--answers", str(tmp_path), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["drafts", "distill", "--head", "64", *options])
    assert result.exit_code == 2
    assert "--answers" in result.stderr


def test_a_drafter_with_an_adapter_is_named_model_at_adapter(tmp_path: Path) -> None:
    target = str(tiny_target(tmp_path / "target"))
    plan = build_plan(PlanOptions(target=target, drafters=("ngram", f"{target}@elsewhere"), backend="transformers"))
    assert [(stage.model, stage.adapter) for stage in plan.drafters] == [("ngram", None), (target, "elsewhere")]
    assert [stage.backend for stage in plan.chain[1:]] == ["auto", "transformers"]
