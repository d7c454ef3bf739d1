from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from autopipe.core.plan import EmulatedStage, NgramOptions, Plan, StagePlan, Warmup
from autopipe.plans import DEFAULT_PLAN_PATH

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "docs/bench.md", "docs/plans.md", "docs/gpu-status.md"]


@pytest.mark.parametrize("model", [Plan, StagePlan, NgramOptions, EmulatedStage, Warmup])
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
    for name in re.findall(r"`((?:core|docs)/[\w/-]+\.\w+|api\.py)`", text):
        folder = ROOT if name.startswith("docs") else ROOT / "autopipe"
        assert (folder / name).is_file(), name


def test_options_named_in_the_pages_exist() -> None:
    source = "".join((ROOT / "autopipe/cli" / file).read_text() for file in ("app.py", "arguments.py"))
    for page in PAGES:
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            if "autopipe run" in line or "autopipe bench" in line:
                for option in re.findall(r"(?<!\w)--[a-z-]+", line):
                    assert option == "--help" or option in source, (page, option)
