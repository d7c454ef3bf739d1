from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from autopipe.profile import (
    Agreement,
    Contention,
    Curves,
    EngineCosts,
    LatencyPoint,
    Machine,
    Memory,
    NgramOffer,
    NgramReplay,
    Profile,
    PromptRecord,
    Settings,
    StageProfile,
)

MODELS = (
    Profile,
    Machine,
    Settings,
    StageProfile,
    Memory,
    Curves,
    LatencyPoint,
    EngineCosts,
    Contention,
    PromptRecord,
    Agreement,
    NgramReplay,
    NgramOffer,
)


@pytest.mark.parametrize("model", MODELS)
def test_the_page_explains_every_key(model: type[BaseModel]) -> None:
    page = (Path(__file__).parents[2] / "docs/profile.md").read_text(encoding="utf-8")
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    quoted = {word for text in re.findall(r"`([^`]+)`", page) for word in re.findall(r"\w+", text)}

    assert set(model.model_fields) - {"prompts"} <= quoted
