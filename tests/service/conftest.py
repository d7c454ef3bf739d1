"""Services for the tests that only talk to them: loading a model takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.service.serving import Running, serving, tiny_plan


@pytest.fixture(scope="session")
def running(tiny_folder: Path) -> Iterator[Running]:
    with serving(tiny_plan(tiny_folder)) as running:
        yield running


@pytest.fixture(scope="session")
def guarded(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One with a key, a journal, tight limits, and prompts in its log."""
    journal = tmp_path_factory.mktemp("journal") / "requests.sqlite"
    limits = {"max_new_tokens": 20, "max_prompt_tokens": 64, "max_choices": 4}
    settings = {"api_key": "s3cret-key", "log_prompts": True, "journal_path": str(journal), "limits": limits}
    with serving(tiny_plan(tiny_folder), **settings) as running:
        yield running


@pytest.fixture(scope="session")
def client(running: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=running.base_url, api_key="none", max_retries=0, timeout=30) as client:
        yield client
