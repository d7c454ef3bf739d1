from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autopipe.cli.app import app
from autopipe.core.errors import ContextLengthError, ModelLoadError
from tests.cli.fakes import FakePipe
from tests.tiny import save_tiny

Invoke = Callable[..., Result]


def test_the_answer_goes_to_stdout_and_the_summary_to_stderr(pipes: list[FakePipe], invoke: Invoke) -> None:
    result = invoke("run", "Hi")

    assert (result.exit_code, result.stdout) == (0, "Hello, world\n")
    assert "3 tokens (stop)" in result.stderr


def test_json_has_the_documented_shape(pipes: list[FakePipe], invoke: Invoke) -> None:
    record = json.loads(invoke("run", "Hi", "--json").stdout)

    assert set(record) == {"text", "token_ids", "finish_reason", "usage", "plan", "stats"}
    assert record["usage"] == {"prompt_tokens": 4, "completion_tokens": 3}
    assert {"total_s", "ttft_s", "ms_per_token", "acceptance_length", "stages"} <= set(record["stats"])
    assert record["plan"]["chain"][-1]["model"] == "smollm2-135m"


def test_a_model_with_a_chat_template_gets_messages(pipes: list[FakePipe], invoke: Invoke) -> None:
    invoke("run", "Hi")

    assert pipes[0].requests[0]["messages"] == [{"role": "user", "content": "Hi"}]


def test_raw_passes_the_text_as_it_stands(pipes: list[FakePipe], invoke: Invoke) -> None:
    invoke("run", "Hi", "--raw")

    assert pipes[0].requests[0] == {"prompt": "Hi"}


def test_a_dash_reads_standard_input(pipes: list[FakePipe], invoke: Invoke) -> None:
    invoke("run", "-", "--raw", input="from a pipe")

    assert pipes[0].requests[0]["prompt"] == "from a pipe"


def test_sampling_options_reach_the_engine(pipes: list[FakePipe], invoke: Invoke) -> None:
    options = "--temperature 0.8 --top-k 5 --top-p 0.9 --min-p 0.1 --seed 7 --max-new-tokens 9 --stop A --stop B"
    invoke("run", "Hi", "--raw", *options.split())

    assert pipes[0].requests[0] == {
        "prompt": "Hi",
        "temperature": 0.8,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
        "max_new_tokens": 9,
        "stop": ("A", "B"),
    }


def test_trace_reaches_the_engine(pipes: list[FakePipe], invoke: Invoke, tmp_path: Path) -> None:
    invoke("run", "Hi", "--trace", str(tmp_path / "trace.json"))

    assert pipes[0].requests[0]["trace"] == str(tmp_path / "trace.json")


def test_stats_shows_a_table_of_stages(pipes: list[FakePipe], invoke: Invoke) -> None:
    assert "ngram" in invoke("run", "Hi", "--stats").stderr


def test_the_engine_is_closed_afterwards(pipes: list[FakePipe], invoke: Invoke) -> None:
    invoke("run", "Hi")

    assert pipes[0].closed


@pytest.mark.parametrize(
    "arguments",
    [
        ("Hi", "--mode", "fast"),
        ("Hi", "--window", "0"),
        ("Hi", "--temperature", "-1"),
        ("Hi", "--min-new-tokens", "5", "--max-new-tokens", "4"),
        ("",),
        ("not UTF-8: \udcff",),
    ],
)
def test_a_bad_option_fails_before_anything_loads(
    pipes: list[FakePipe], invoke: Invoke, arguments: tuple[str, ...]
) -> None:
    result = invoke("run", *arguments)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "is not allowed; allowed:" in result.stderr
    assert "Traceback" not in result.stderr
    assert pipes == []


def test_standard_input_that_is_not_utf8_is_refused(pipes: list[FakePipe], invoke: Invoke) -> None:
    result = invoke("run", "-", input=b"caf\xe9 au lait")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: PROMPT: ")
    assert "byte 3" in result.stderr
    assert pipes == []


@pytest.mark.parametrize("name", ["", "missing/trace.json"])
def test_a_trace_that_cannot_be_written_is_told_before_anything_loads(
    name: str, pipes: list[FakePipe], invoke: Invoke, tmp_path: Path
) -> None:
    result = invoke("run", "Hi", "--trace", str(tmp_path / name))

    assert result.exit_code == 2
    assert result.stderr.startswith("error: --trace: ")
    assert pipes == []
    assert list(tmp_path.iterdir()) == []


def test_characters_that_stdout_cannot_encode_become_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "autopipe.cli.run_command.open_pipe", lambda plan, **_: FakePipe(plan, words=("caf\u00e9", " \u2603"))
    )
    result = CliRunner(charset="ascii").invoke(app, ["run", "Hi"])

    assert (result.exit_code, result.stdout) == (0, "caf? ?\n")


def test_json_on_a_stdout_that_is_not_utf8_keeps_every_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopipe.cli.run_command.open_pipe", lambda plan, **_: FakePipe(plan, words=("caf\u00e9",)))
    result = CliRunner(charset="ascii").invoke(app, ["run", "Hi", "--json"])

    assert json.loads(result.stdout)["text"] == "caf\u00e9"


def refuse_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the preflight of the real `AutoPipe` run, and no more."""

    def engine(plan: object, preflight: Callable[[], None]) -> None:
        preflight()
        pytest.fail("weights would load now")

    monkeypatch.setattr("autopipe.api.Engine", engine)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--max-new-tokens", "512"), "--max-new-tokens"),
        (("--device", "foo"), "--device"),
        (("--adapter", "/nope"), "--adapter"),
    ],
)
def test_what_only_the_model_can_tell_is_told_before_weights_load_by_the_option(
    arguments: tuple[str, ...], option: str, tiny_folder: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_load(monkeypatch)
    result = invoke("run", "Hi", "--target", str(tiny_folder), *arguments)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option}: {arguments[1]!r}".replace("'512'", "512"))
    assert arguments[0] != "--max-new-tokens" or "1 to 511: the target's context holds 512 tokens" in result.stderr


def test_a_model_that_cannot_be_a_stage_is_named_by_its_option(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_load(monkeypatch)
    result = invoke("run", "Hi", "--target", str(save_tiny(tmp_path / "mamba", "mamba")))

    assert result.exit_code == 1
    assert result.stderr.startswith("error: --target: ")


def test_keys_of_a_plan_file_keep_their_names(
    tiny_folder: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_load(monkeypatch)
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"chain:\n  - {{model: ngram}}\n  - {{model: {tiny_folder}, device: foo}}\n")
    result = invoke("run", "Hi", "--plan", str(plan), "--dtype", "fp32")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: chain.1.device: 'foo'")


def test_a_prompt_too_long_for_the_target_is_a_bad_option(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setattr(
        "autopipe.cli.run_command.open_pipe",
        lambda plan, **_: FakePipe(plan, error=ContextLengthError("the prompt has 600 tokens")),
    )
    result = invoke("run", "Hi")

    assert (result.exit_code, result.stderr) == (2, "error: the prompt has 600 tokens\n")


def test_a_slow_conversion_is_told_on_stderr(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    def check_stage(stage: object, key: str, *, progress: Callable[[str], None]) -> None:
        progress("converting model.gguf")
        raise ModelLoadError("enough")

    refuse_to_load(monkeypatch)
    monkeypatch.setattr("autopipe.core.backends.load.check_stage", check_stage)

    assert invoke("run", "Hi").stderr == "converting model.gguf\nerror: enough\n"


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (ModelLoadError("no weights"), 1), (BrokenPipeError(), 1)]
)
def test_an_interrupted_or_failed_run_closes_the_engine(
    monkeypatch: pytest.MonkeyPatch, invoke: Invoke, error: BaseException, code: int
) -> None:
    opened: list[FakePipe] = []

    def open_pipe(plan: object, **_: object) -> FakePipe:
        opened.append(FakePipe(plan, error=error))  # type: ignore[arg-type]
        return opened[0]

    monkeypatch.setattr("autopipe.cli.run_command.open_pipe", open_pipe)
    result = invoke("run", "Hi")

    assert result.exit_code == code
    assert opened[0].closed
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_unwinds_the_command(number: signal.Signals, code: int, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import time\n"
        "from autopipe.cli import main, run_command\n"
        "from tests.cli.fakes import FakePipe\n"
        "class Waiting(FakePipe):\n"
        "    def stream(self, **request):\n"
        "        print('started', flush=True)\n"
        "        time.sleep(60)\n"
        "    def close(self):\n"
        "        print('closed', flush=True)\n"
        "run_command.open_pipe = lambda plan, **_: Waiting(plan)\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script), "run", "Hi"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()

    assert (process.returncode, out) == (code, "closed\n")
    assert "Traceback" not in err
