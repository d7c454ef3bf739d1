from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from autopipe.bench.prompts import Prompt
from autopipe.cli.bench_command import encode_prompt
from autopipe.core.errors import ConfigError
from tests.cli.fakes import FakePipe, FakeTokenizer

Invoke = Callable[..., Result]

ROW_KEYS = {
    "name",
    "ms_per_token",
    "ms_per_token_min",
    "ms_per_token_max",
    "tokens_per_s",
    "speedup_over_plain",
    "median_speedup",
    "speedup_over_transformers",
    "acceptance_length",
    "prompts",
    "tokens",
    "identical",
    "first_difference",
    "j_per_token",
    "devices",
}


@pytest.fixture
def prompt_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("autopipe.cli.bench_command.load_tokenizer", lambda plan, **_: FakeTokenizer())
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    return str(file)


def test_json_has_the_documented_shape(pipes: list[FakePipe], invoke: Invoke, prompt_file: str) -> None:
    result = invoke("bench", "--prompts", prompt_file, "--compare", "plain,lockstep", "--json")
    record = json.loads(result.stdout)

    assert set(record) == {"rows", "machine", "plan"}
    assert [row["name"] for row in record["rows"]] == ["plain", "lockstep"]
    assert all(set(row) == ROW_KEYS for row in record["rows"])
    assert record["rows"][1]["identical"] == record["rows"][1]["prompts"] == 2


def test_devices_are_sampled_unless_telemetry_is_off(pipes: list[FakePipe], invoke: Invoke, prompt_file: str) -> None:
    arguments = ["bench", "--prompts", prompt_file, "--compare", "plain", "--json"]
    sampled = json.loads(invoke(*arguments).stdout)["rows"][0]
    plain = json.loads(invoke(*arguments, "--no-telemetry").stdout)["rows"][0]

    assert isinstance(sampled["devices"], list)
    assert plain["devices"] is None


def test_arms_that_differ_in_mode_and_window_share_an_engine(
    pipes: list[FakePipe], invoke: Invoke, prompt_file: str
) -> None:
    invoke("bench", "--prompts", prompt_file, "--compare", "plain,lockstep,lockstep:window=2")

    assert len(pipes) == 1
    assert {(plan.mode.value, plan.chain[0].window) for plan in pipes[0].applied} == {
        ("plain", 11),
        ("lockstep", 11),
        ("lockstep", 2),
    }
    assert pipes[0].closed


def test_arms_with_other_models_get_an_engine_of_their_own(
    pipes: list[FakePipe], invoke: Invoke, prompt_file: str
) -> None:
    invoke("bench", "--prompts", prompt_file, "--compare", "plain,plain:dtype=fp32")

    assert [pipe.plan.target.dtype.value for pipe in pipes] == ["bf16", "fp32"]


def test_windows_are_for_the_arms_that_have_drafters(pipes: list[FakePipe], invoke: Invoke, prompt_file: str) -> None:
    result = invoke("bench", "--prompts", prompt_file, "--compare", "plain:drafter=none,lockstep", "--window", "3")

    assert result.exit_code == 0
    assert [[stage.window for stage in pipe.plan.drafters] for pipe in pipes] == [[], [3]]


def test_every_arm_gets_the_same_ids_and_options(pipes: list[FakePipe], invoke: Invoke, prompt_file: str) -> None:
    invoke(
        "bench",
        "--prompts",
        prompt_file,
        "--compare",
        "plain,lockstep",
        "--temperature",
        "0.8",
        "--seed",
        "3",
    )
    measured = [request for request in pipes[0].requests if request["max_new_tokens"] == 160]

    assert [request["input_ids"] for request in measured] == [list(b"one")] * 2 + [list(b"two")] * 2
    assert all((request["temperature"], request["seed"]) == (0.8, 3) for request in measured)


def test_all_arms_get_the_threads_asked_for(pipes: list[FakePipe], invoke: Invoke, prompt_file: str) -> None:
    result = invoke("bench", "--prompts", prompt_file, "--compare", "plain", "--threads", "3", "--json")

    assert pipes[0].plan.target.threads == 3
    assert json.loads(result.stdout)["machine"]["threads"] == 3


def test_a_peer_that_is_not_installed_is_said_to_be_missing(
    pipes: list[FakePipe], invoke: Invoke, prompt_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    result = invoke("bench", "--prompts", prompt_file, "--compare", "plain,llama.cpp", "--json")
    record = json.loads(result.stdout)

    assert "pip install llama-cpp-python" in result.stderr
    assert "pip install llama-cpp-python" in record["machine"]["missing"]["llama.cpp"]
    assert record["rows"][1]["ms_per_token"] is None


def test_the_table_names_every_arm(pipes: list[FakePipe], invoke: Invoke, prompt_file: str) -> None:
    result = invoke("bench", "--prompts", prompt_file, "--compare", "plain,lockstep")

    assert "plain" in result.stdout
    assert "2/2" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--compare", "plain,warp"),
        ("--compare", "plain,plain"),
        ("--compare", "lockstep:window=x"),
        ("--compare", "lockstep:speed=9"),
        ("--compare", "transformers:window=3"),
        ("--prompts", "humaneval:0"),
        ("--prompts", "nowhere.jsonl"),
        ("--repeat", "0"),
        ("--max-new-tokens", "0"),
    ],
)
def test_a_bad_option_fails_before_anything_loads(
    pipes: list[FakePipe], invoke: Invoke, arguments: tuple[str, ...]
) -> None:
    result = invoke("bench", *arguments)

    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert pipes == []


def test_chat_prompts_want_a_chat_template() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = None

    with pytest.raises(ConfigError, match="chat template"):
        encode_prompt(Prompt("p", messages=({"role": "user", "content": "x"},)), tokenizer)


def test_texts_are_encoded_as_they_stand() -> None:
    assert encode_prompt(Prompt("p", text="ab"), FakeTokenizer()) == [97, 98]
