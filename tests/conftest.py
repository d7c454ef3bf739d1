"""Fixtures for all tests. Nothing here, and no test, reaches a network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from autopipe import AutoPipe, Plan
from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fp32 Llama with its tokenizer, as a Hugging Face folder."""
    return save_tiny(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bf16."""
    return save_tiny(tmp_path_factory.mktemp("tiny-llama-bf16"), dtype=torch.bfloat16)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty AutoPipe cache, for this test only."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("AUTOPIPE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def pipe(tiny_folder: Path) -> Iterator[AutoPipe]:
    """An n-gram drafter in front of a tiny model, in lockstep."""
    plan = Plan.parse(
        {"chain": [{"model": "ngram", "ngram": {"gate": False}}, {"model": str(tiny_folder)}], "mode": "lockstep"}
    )
    with AutoPipe.from_plan(plan) as pipe:
        yield pipe
