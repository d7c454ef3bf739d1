from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopipe.profile import Profile
from tests.profile.samples import sample_profile

EMULATED = "chain: [{model: ngram}, {model: emulated, name: big, emulated: {ms: {1: 1}}}]"


@pytest.fixture
def plan(tmp_path: Path) -> str:
    (tmp_path / "plan.yaml").write_text(EMULATED)
    return str(tmp_path / "plan.yaml")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was asked of `profile_plan`, which answers at once."""
    calls: list[dict[str, Any]] = []

    def profile_plan(plan: Any, prompts: Any, output: Any, **options: Any) -> Profile:
        calls.append({"plan": plan, "prompts": prompts, "output": output, **options})
        options["advance"]("measuring", 0.5)
        return sample_profile()

    monkeypatch.setattr("autopipe.profile.profile_plan", profile_plan)
    return calls


def test_prompts_keep_the_kind_of_their_set(invoke, tmp_path: Path, plan: str, asked: list[dict[str, Any]]) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "abc"}\n')
    result = invoke("profile", "--plan", plan, "--prompts", "humaneval:2", "--prompts", str(tmp_path / "mine.jsonl"))

    assert result.exit_code == 0, result.output
    assert [prompt.kind for prompt in asked[0]["prompts"]] == ["code", "code", "mine"]
    assert len(asked[0]["prompts"][-1].ids) == len("abc")


def test_options_reach_the_measurement(invoke, plan: str, asked: list[dict[str, Any]]) -> None:
    invoke("profile", "--plan", plan, "--prompts", "humaneval:1", "--threads", "1", "--threads", "2", "--fresh")

    assert asked[0]["threads"] == [1, 2]
    assert asked[0]["resume"] is False


def test_json_goes_to_stdout_and_everything_else_to_stderr(invoke, plan: str, asked: list[dict[str, Any]]) -> None:
    result = invoke("profile", "--plan", plan, "--prompts", "humaneval:1", "--json")

    assert Profile.parse(json.loads(result.stdout)) == sample_profile()
    assert "measuring" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompts", "poems"], "--prompts"),
        (["--repeats", "0"], "--repeats"),
        (["--max-new-tokens", "1"], "--max-new-tokens"),
        (["--threads", "0"], "--threads"),
        (["--plan", "nowhere.yaml"], "--plan"),
        (["--out", "."], "--out"),
        (["--max-new-tokens", "2000000"], "--max-new-tokens"),
    ],
)
def test_a_bad_option_is_named_and_nothing_is_measured(
    invoke, plan: str, asked: list[dict[str, Any]], arguments: list[str], named: str
) -> None:
    result = invoke("profile", "--plan", plan, *arguments)

    assert result.exit_code == 2
    assert named in result.stderr
    assert not asked
