"""`autopipe serve`: options, checked before anything loads."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autopipe import service
from autopipe.cli.app import app
from autopipe.core.plan import Plan
from autopipe.service.config import ServiceConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, ServiceConfig]]:
    """What would have been served."""
    calls: list[tuple[Plan, ServiceConfig]] = []
    monkeypatch.setattr(service, "serve", lambda plan, config, **_: calls.append((plan, config)))
    return calls


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments], env=environment)


def test_options_become_a_plan_and_a_configuration(served: list[tuple[Plan, ServiceConfig]]) -> None:
    done = run("--port", "0", "--window", "3", "--policy", "bandit", "--idle-unload", "60", "--max-queue", "5")
    assert done.exit_code == 0, done.output
    ((plan, config),) = served
    assert plan.drafters[0].window == 3
    assert (config.host, config.port, config.policy, config.idle_unload_s) == ("127.0.0.1", 0, "bandit", 60)
    assert config.limits.max_queue == 5
    assert config.journal_path is None
    assert config.log_prompts is False


def test_the_alias_is_the_targets_name_unless_given(served: list[tuple[Plan, ServiceConfig]]) -> None:
    run()
    run("--served-model-name", "mine")
    assert [config.served_model_name for _, config in served] == [served[0][0].target.model, "mine"]


def test_the_key_may_come_from_the_environment(served: list[tuple[Plan, ServiceConfig]]) -> None:
    assert run("--host", "0.0.0.0", AUTOPIPE_API_KEY="secret").exit_code == 0
    assert served[0][1].api_key == "secret"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--host", "0.0.0.0"], "--host"),
        (["--port", "70000"], "--port"),
        (["--policy", "luck"], "--policy"),
        (["--max-choices", "0"], "--max-choices"),
        (["--served-model-name", "a/b"], "--served-model-name"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--target", "/no/such/folder"], "--target"),
        (["--kv-mb", "0"], "--kv-mb"),
        (["--policy", "rules", "--policy-path", "x"], "--policy-path"),
    ],
)
def test_a_bad_option_is_named(served: list[tuple[Plan, ServiceConfig]], arguments: list[str], option: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert f"error: {option}: " in done.stderr
    assert served == []


def test_an_open_service_warns(served: list[tuple[Plan, ServiceConfig]]) -> None:
    done = run("--host", "0.0.0.0", "--allow-unauthenticated-remote")
    assert done.exit_code == 0
    assert "warning: everybody who can reach 0.0.0.0" in done.stderr


def test_a_port_that_is_taken_is_told_before_anything_loads(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--port", str(taken.getsockname()[1]))
    assert done.exit_code == 2
    assert "error: --port: " in done.stderr


def test_a_missing_extra_is_one_line_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__
    monkeypatch.delitem(sys.modules, "fastapi", raising=False)

    def refuse(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "fastapi":
            raise ImportError("No module named 'fastapi'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(service.importlib, "import_module", lambda name: refuse(name))
    done = run()
    assert done.exit_code == 1
    assert done.stderr.strip().count("\n") == 0
    assert "pip install 'autopipe-llm[serve]'" in done.stderr
