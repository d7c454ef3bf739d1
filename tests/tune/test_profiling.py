from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from autopipe.bench.workload import spread
from autopipe.core.plan import Plan
from autopipe.profile import Profile, ProfilePrompt
from autopipe.tune import profiling
from autopipe.tune.profiling import ProfileTimeError, chains
from tests.tune.conftest import Measured, measure
from tests.tune.scenes import EMULATED

OTHER = ProfilePrompt("other", "chat", (1, 2, 3))


@pytest.fixture(autouse=True)
def _little_effort(little_effort: None) -> None:
    """For all tests of this file."""


def profile(measured: Measured, folder: Path | None = None, **changes: Any) -> Profile:
    """The shared profile, if nothing is changed."""
    prompts = changes.pop("prompts", measured.prompts)
    return measure(measured.plan, prompts, folder or measured.profiles, **changes)


def test_the_same_profile_is_measured_once(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "profile_plan", lambda *_, **__: pytest.fail("measured again"))

    assert profile(measured) == measured.profile


@pytest.mark.parametrize("change", [{"prompts": (OTHER,)}, {"drafters": ()}, {"fresh": True}])
def test_anything_that_matters_is_measured_anew(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    class MeasuredError(Exception):
        pass

    def measure(*_: Any, **__: Any) -> None:
        raise MeasuredError

    monkeypatch.setattr(profiling, "profile_plan", measure)
    with pytest.raises(MeasuredError):
        profile(measured, **change)


def test_a_spoilt_file_is_measured_again(measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for file in measured.profiles.glob("*.json"):
        (tmp_path / file.name).write_text("{}")
    again: list[bool] = []
    monkeypatch.setattr(profiling, "profile_plan", lambda *_, **__: again.append(True) or measured.profile)
    profile(measured, tmp_path)

    assert again == [True]


def test_a_profile_stops_when_its_time_is_up(measured: Measured, tmp_path: Path) -> None:
    with pytest.raises(ProfileTimeError):
        profile(measured, tmp_path, deadline_s=time.monotonic() - 1)


def test_a_profile_that_another_call_measures_is_waited_for(measured: Measured) -> None:
    key = profiling._key(Plan.parse({"chain": measured.plan.chain}), measured.prompts, 12)
    assert (measured.profiles / f"{key}-full.json").is_file()
    with FileLock(measured.profiles / f".{key}.lock"), pytest.raises(ProfileTimeError):
        profile(measured, deadline_s=time.monotonic() + 0.2)

    assert profile(measured) == measured.profile


def test_more_drafters_than_a_chain_holds_are_measured_in_several_chains() -> None:
    plan = Plan.parse(EMULATED)
    drafters = [plan.drafters[0].replace(name=f"d{n}") for n in range(6)]
    parts = chains(plan.target, drafters, plan)

    assert [len(part.chain) for part in parts] == [5, 3]
    assert all(part.target == plan.target for part in parts)


def test_profiles_with_the_same_target_become_one(measured: Measured) -> None:
    first = measured.profile
    renamed = first.model_dump()
    for entry in (renamed["stages"][0], renamed["agreement"][0]):
        entry["name" if "name" in entry else "drafter"] = "other"
    renamed["contention"] = ()
    whole = profiling.merge([first, Profile.parse(renamed)])

    assert [each.name for each in whole.stages] == ["small", "other", "big"]
    assert [each.drafter for each in whole.agreement] == ["small", "other"]


def test_few_prompts_are_of_all_kinds() -> None:
    many = [ProfilePrompt(f"{kind}{n}", kind, (n + 1,)) for kind in ("code", "chat") for n in range(10)]

    assert [prompt.name for prompt in spread(many, 4)] == ["code0", "code5", "chat0", "chat5"]
    assert len(spread(many, 100)) == 20
    assert {prompt.kind for prompt in spread(many, 1)} == {"code", "chat"}
