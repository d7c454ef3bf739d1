from __future__ import annotations

import pytest

from autopipe.core.errors import ConfigError, ModelLoadError, StageError
from autopipe.core.plan import StagePlan
from autopipe.profile.process import StageProcess

EMULATED = StagePlan.parse({"model": "emulated", "emulated": {"ms": {1: 0.1}, "vocab_size": 16, "max_length": 64}})


@pytest.fixture(scope="module")
def process() -> StageProcess:
    with StageProcess("toy", 1) as process:
        process.load(EMULATED, exact=True, threads=1)
        yield process


def test_a_loaded_stage_answers(process: StageProcess) -> None:
    found = process.ask("greedy", prompt=[1, 2], max_new_tokens=5, eos=[])

    assert len(found["token_ids"]) == 5


def test_memory_of_the_process_is_known(process: StageProcess) -> None:
    memory = process.ask("memory")

    assert memory["rss_bytes"] > 1 << 20
    assert memory["weight_bytes"] == 0


def test_an_error_of_the_stage_is_raised_here_and_the_process_lives_on(process: StageProcess) -> None:
    with pytest.raises((ConfigError, ModelLoadError, Exception), match="toy"):
        process.ask("greedy", prompt=[99], max_new_tokens=5, eos=[])

    assert process.ask("memory")["rss_bytes"] > 0


def test_a_process_that_ends_is_an_error_that_names_the_stage() -> None:
    process = StageProcess("toy", 1)
    process._process.kill()
    with process, pytest.raises(StageError, match="toy"):
        process.ask("memory")


def test_closing_ends_the_process() -> None:
    process = StageProcess("toy", 1)
    process.close()

    assert process._process.poll() is not None
