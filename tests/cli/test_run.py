from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from autopipe.core.errors import ModelLoadError
from tests.cli.fakes import FakePipe

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
        ("Hi", "--trace", "/no/such/folder/trace.json"),
        ("",),
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


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (ModelLoadError("no weights"), 1), (BrokenPipeError(), 1)]
)
def test_an_interrupted_or_failed_run_closes_the_engine(
    monkeypatch: pytest.MonkeyPatch, invoke: Invoke, error: BaseException, code: int
) -> None:
    opened: list[FakePipe] = []

    def open_pipe(plan: object) -> FakePipe:
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
        "run_command.open_pipe = Waiting\n"
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
