from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from autopipe.bench.workload import spread
from autopipe.core.plan import Plan
from autopipe.profile import Profile, ProfilePrompt
from autopipe.tune import profiling
from autopipe.tune.profiling import ProfileTimeError, cached_profile, chains

PROMPTS = (ProfilePrompt("a", "chat", (1, 2, 3)), ProfilePrompt("b", "code", (4, 5, 6)))


def stage(name: str, ms: float, agreement: float = 1.0) -> dict[str, Any]:
    return {"model": "emulated", "name": name, "emulated": {"ms": {1: ms}, "agreement": agreement}}


PLAN = Plan.parse({"chain": [stage("small", 0.2, 0.7), stage("big", 1.0)]})


def profile(folder: Path, **changes: Any) -> Profile:
    return cached_profile(
        PLAN.target,
        changes.pop("drafters", PLAN.drafters),
        changes.pop("prompts", PROMPTS),
        base=PLAN,
        workload=("mine",),
        eos_token_ids=(),
        max_new_tokens=12,
        budget_s=30.0,
        folder=folder,
        **{"deadline_s": math.inf, **changes},
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile]:
    folder = tmp_path_factory.mktemp("profiles")
    return folder, profile(folder)


def test_the_same_profile_is_measured_once(measured: tuple[Path, Profile], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, first = measured
    monkeypatch.setattr(profiling, "profile_plan", lambda *_, **__: pytest.fail("measured again"))

    assert profile(folder) == first


@pytest.mark.parametrize("change", [{"prompts": PROMPTS[:1]}, {"drafters": ()}, {"fresh": True}])
def test_anything_that_matters_is_measured_anew(
    measured: tuple[Path, Profile], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    class MeasuredError(Exception):
        pass

    def measure(*_: Any, **__: Any) -> None:
        raise MeasuredError

    monkeypatch.setattr(profiling, "profile_plan", measure)
    with pytest.raises(MeasuredError):
        profile(measured[0], **change)


def test_a_spoilt_file_is_measured_again(
    measured: tuple[Path, Profile], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for file in measured[0].glob("*.json"):
        (tmp_path / file.name).write_text("{}")
    again: list[bool] = []
    monkeypatch.setattr(profiling, "profile_plan", lambda *_, **__: again.append(True) or measured[1])
    profile(tmp_path)

    assert again == [True]


def test_a_profile_stops_when_its_time_is_up(tmp_path: Path) -> None:
    with pytest.raises(ProfileTimeError):
        profile(tmp_path, deadline_s=time.monotonic() - 1)


def test_a_profile_that_another_call_measures_is_waited_for(measured: tuple[Path, Profile]) -> None:
    (file,) = measured[0].glob("*-quick.json")
    key = file.name.removesuffix("-quick.json")
    with FileLock(measured[0] / f".{key}.lock"), pytest.raises(ProfileTimeError):
        profile(measured[0], deadline_s=time.monotonic() + 0.2)

    assert profile(measured[0]) == measured[1]


def test_more_drafters_than_a_chain_holds_are_measured_in_several_chains() -> None:
    drafters = [Plan.parse({"chain": [stage(f"d{n}", 1.0)]}).target for n in range(6)]
    parts = chains(PLAN.target, drafters, PLAN)

    assert [len(part.chain) for part in parts] == [5, 3]
    assert all(part.target == PLAN.target for part in parts)


def test_profiles_with_the_same_target_become_one(measured: tuple[Path, Profile]) -> None:
    first = measured[1]
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
