"""Fixtures of more than one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopipe.core.engine import Engine
from tests.core.engine_scenes import THREE, plan


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(plan(*THREE)) as engine:
        yield engine
