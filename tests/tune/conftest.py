"""One measured profile for all tests: measuring takes most of their time."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autopipe.bench.workload import encode_workload, read_workload
from autopipe.core.plan import Plan
from autopipe.profile import Profile, ProfilePrompt
from autopipe.tune import profiling
from autopipe.tune.predict import plain_plan
from autopipe.tune.profiling import Effort, cached_profile
from tests.tune.scenes import EMULATED

LITTLE = Effort("full", 3, 1, (64,), (1, 4, 9, 32))
"""Stands in for `FULL`, so that calls in other processes find what was measured."""


@dataclass(frozen=True)
class Measured:
    """Prompts and a cache in `folder`, and the profile of `EMULATED` that is in that cache."""

    folder: Path
    plan: Plan
    prompts: tuple[ProfilePrompt, ...]
    profile: Profile

    @property
    def profiles(self) -> Path:
        return self.folder / "cache" / "profiles"


def measure(plan: Plan, prompts: tuple[ProfilePrompt, ...], folder: Path, **changes: Any) -> Profile:
    """As `autopipe tune` would with an hour's budget."""
    options = {"fresh": False, "deadline_s": math.inf, "drafters": plan.drafters, **changes}
    return cached_profile(
        plan.target,
        options.pop("drafters"),
        prompts,
        base=plan,
        workload=("mine",),
        eos_token_ids=(),
        max_new_tokens=12,
        budget_s=3600.0,
        folder=folder,
        **options,
    )


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("tune")
    texts = ("abc", "hello", "why")
    (folder / "mine.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    plan = Plan.parse(EMULATED)
    prompts = tuple(encode_workload(read_workload((str(folder / "mine.jsonl"),), "--workload"), plain_plan(plan)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "FULL", LITTLE)
        profile = measure(plan, prompts, folder / "cache" / "profiles")
    return Measured(folder, plan, prompts, profile)


@pytest.fixture
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles that a test measures anew are small ones."""
    monkeypatch.setattr(profiling, "FULL", LITTLE)
