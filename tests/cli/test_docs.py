from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.main import get_command

from autopipe.cli.app import app
from autopipe.core.plan import CudaOptions, EmulatedStage, NgramOptions, Plan, StagePlan, Warmup
from autopipe.plans import DEFAULT_PLAN_PATH

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/bench.md",
    "docs/plans.md",
    "docs/gpu-status.md",
    "docs/hardware.md",
    "docs/profile.md",
    "docs/serve.md",
    "docs/tune.md",
]


@pytest.mark.parametrize("model", [Plan, StagePlan, NgramOptions, EmulatedStage, CudaOptions, Warmup])
def test_plans_page_lists_every_key(model: type[BaseModel]) -> None:
    listed = set(re.findall(r"`(\w+)`", (ROOT / "docs/plans.md").read_text(encoding="utf-8")))

    assert set(model.model_fields) <= listed


def test_the_plan_of_the_page_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/plans.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "plan.yaml").write_text(example)

    assert len(Plan.load(tmp_path / "plan.yaml").chain) == 3


def test_the_shipped_plan_is_valid() -> None:
    assert Plan.load(DEFAULT_PLAN_PATH).target.model == "smollm2-135m"


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert ((ROOT / page).parent / link).exists(), link


def test_files_named_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:core|docs|envs)/[\w/-]+\.\w+|api\.py|inputs\.py)`", text):
        folder = ROOT if name.startswith("docs") else ROOT / "autopipe"
        assert (folder / name).is_file(), name


def options_of(command: Any) -> set[str]:
    """All option names of a command and those under it."""
    own = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
    return own.union(*map(options_of, getattr(command, "commands", {}).values()))


def test_options_named_in_the_pages_exist() -> None:
    commands = get_command(app).commands
    for page in PAGES:
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            for name, rest in re.findall(r"autopipe ([a-z]+)((?:(?! autopipe ).)*)", line):
                if name in commands:
                    for option in re.findall(r"(?<!\w)--[a-z-]+", rest):
                        assert option == "--help" or option in options_of(commands[name]), (page, line)


def test_readme_lists_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in get_command(app).commands:
        assert f"| `autopipe {command}` |" in readme, command


def test_contributing_lists_every_package() -> None:
    listed = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for package in (ROOT / "autopipe").glob("*/__init__.py"):
        assert f"`autopipe/{package.parent.name}`" in listed, package
