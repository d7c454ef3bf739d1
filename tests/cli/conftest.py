from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from autopipe.cli.app import app
from autopipe.core.plan import Plan
from tests.cli.fakes import FakePipe


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> list[FakePipe]:
    """Engines that commands opened; all of them fakes."""
    opened: list[FakePipe] = []

    def open_pipe(plan: Plan, **_: object) -> FakePipe:
        opened.append(FakePipe(plan))
        return opened[-1]

    monkeypatch.setattr("autopipe.cli.run_command.open_pipe", open_pipe)
    monkeypatch.setattr("autopipe.cli.bench_command.open_pipe", open_pipe)
    return opened


@pytest.fixture
def invoke() -> Callable[..., Result]:
    """Run `autopipe ARGUMENTS...` in this process."""
    return lambda *arguments, **options: CliRunner().invoke(app, list(arguments), **options)
