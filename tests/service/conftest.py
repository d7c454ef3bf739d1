"""One service for the tests that only talk to it."""

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
def client(running: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=running.base_url, api_key="none", max_retries=0, timeout=30) as client:
        yield client
