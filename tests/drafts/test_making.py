"""`autopipe drafts answers` on a tiny model, from command line to folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from autopipe.cli.app import app
from autopipe.core.backends.load import load_backend
from autopipe.core.plan import StagePlan
from autopipe.drafts.store import read_answers, read_header
from autopipe.profile.teacher import greedy_output
from tests.tiny import EOS_ID


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {number} is"}) + "\n" for number in range(6)))
    return path


def answers(tiny_folder: Path, out: Path, *arguments: str):
    command = ["drafts", "answers", "--target", str(tiny_folder), "--dtype", "fp32", "--out", str(out), *arguments]
    return CliRunner().invoke(app, [*command, "--max-new-tokens", "8", "--threads", "1"])


def test_answers_are_those_of_plain_greedy_decoding(tiny_folder: Path, tmp_path: Path, prompts_file: Path) -> None:
    result = answers(tiny_folder, tmp_path / "a", "--prompts", str(prompts_file), "--tokens", "1000", "--json")
    assert result.exit_code == 0, result.output
    backend = load_backend(StagePlan(model=str(tiny_folder), dtype="fp32"), threads=1)

    found = [answer for answer in read_answers(tmp_path / "a") if answer.meta["sampling"] == "greedy"]
    assert len(found) == 6
    for answer in found:
        prompt = answer.token_ids[: answer.prompt_length].tolist()
        plain = greedy_output(backend, prompt, 8, [EOS_ID])["token_ids"]
        assert answer.token_ids[answer.prompt_length :].tolist() == plain
    assert read_header(tmp_path / "a")["target"] == str(tiny_folder)


def test_a_second_run_goes_on_where_the_first_stopped(tiny_folder: Path, tmp_path: Path, prompts_file: Path) -> None:
    options = ("--prompts", str(prompts_file), "--batch", "1", "--json")
    first = json.loads(answers(tiny_folder, tmp_path / "a", *options, "--tokens", "16").stdout)
    second = json.loads(answers(tiny_folder, tmp_path / "a", *options, "--tokens", "1000").stdout)

    keys = [answer.meta["key"] for answer in read_answers(tmp_path / "a")]
    assert first["num_answers"] < second["num_answers"] == len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("option", "value"),
    [("--tokens", "0"), ("--batch", "65"), ("--batch", "0"), ("--prompts", "humaneval"), ("--prompts", "no.jsonl")],
)
def test_a_bad_option_is_named(tiny_folder: Path, tmp_path: Path, option: str, value: str) -> None:
    result = answers(tiny_folder, tmp_path / "a", option, value)

    assert result.exit_code == 2
    assert option in result.output


def test_a_folder_that_another_run_fills_is_refused(tiny_folder: Path, tmp_path: Path, prompts_file: Path) -> None:
    (tmp_path / "a").mkdir()
    with FileLock(tmp_path / "a" / ".lock"):
        result = answers(tiny_folder, tmp_path / "a", "--prompts", str(prompts_file))

    assert result.exit_code == 2
    assert "another run" in result.output or "no other run" in result.output
