"""Profiling a whole chain: emulated stages, so that it takes seconds and what must come out is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan
from autopipe.profile import Profile, ProfilePrompt, default_threads, profile_plan, simulate_plan

PLAN = Plan.parse(
    {
        "chain": [
            {"model": "ngram"},
            {"model": "emulated", "name": "small", "window": 4, "emulated": {"ms": {1: 1}, "agreement": 0.7}},
            {"model": "emulated", "name": "big", "emulated": {"ms": {1: 2, 4: 4}}},
        ]
    }
)
PROMPTS = (ProfilePrompt("a", "chat", (1, 2, 3)), ProfilePrompt("b", "code", (4, 5, 6, 7)))
QUICK: dict[str, Any] = {
    "contexts": (8, 32),
    "verify_tokens": (1, 4),
    "repeats": 3,
    "threads": (1,),
    "max_new_tokens": 24,
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a profile was measured up to the outputs, and then interrupted."""
    path = tmp_path_factory.mktemp("profile") / "p.json"

    def interrupt(label: str, share: float) -> None:
        if label.startswith("output 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_plan(PLAN, PROMPTS, path, advance=interrupt, **QUICK)
    assert not path.exists()
    return path


@pytest.fixture(scope="module")
def resumed(interrupted: Path) -> tuple[Profile, list[str]]:
    """The profile, taken up again, and what was said while it was measured."""
    parts = interrupted.with_name("p.json.partial").read_text()
    assert '"output 0"' in parts
    labels: list[str] = []
    profile = profile_plan(PLAN, PROMPTS, interrupted, advance=lambda label, share: labels.append(label), **QUICK)
    return profile, labels


def test_an_interrupted_profile_keeps_what_was_measured(interrupted: Path, resumed: tuple[Profile, Any]) -> None:
    profile, _ = resumed

    assert profile == Profile.load(interrupted)
    assert not interrupted.with_name("p.json.partial").exists()


def test_latency_curves_are_those_of_the_stages(resumed: tuple[Profile, Any]) -> None:
    big = resumed[0].stages[-1]
    (curves,) = big.curves
    seconds = {(point.context, point.tokens): point.seconds for point in curves.verify}

    assert seconds.keys() == {(8, 1), (8, 4), (32, 1), (32, 4)}
    assert 0.002 <= seconds[8, 1] < seconds[8, 4]


def test_agreement_is_that_of_the_drafter(resumed: tuple[Profile, Any]) -> None:
    (table,) = resumed[0].agreement

    assert table.drafter == "small"
    assert [len(bits) for bits in table.agrees] == [24, 24]
    assert 0.4 < table.rate < 0.95


def test_prompts_keep_their_kinds(resumed: tuple[Profile, Any]) -> None:
    assert [prompt.kind for prompt in resumed[0].prompts] == ["chat", "code"]


def test_contention_is_measured_both_ways(resumed: tuple[Profile, Any]) -> None:
    entries = {(each.stage, each.other): each.factor for each in resumed[0].contention}

    assert entries.keys() == {("small", "big"), ("big", "small")}
    assert all(factor >= 1 for factor in entries.values())


def test_joining_costs_a_load_and_other_settings_do_not(resumed: tuple[Profile, Any]) -> None:
    engine = resumed[0].engine

    assert engine.settings_s < engine.join_s["small"]
    assert engine.step_s >= 0.002
    assert engine.handover_s is not None


def test_progress_ends_with_done(resumed: tuple[Profile, list[str]]) -> None:
    assert resumed[1][-1] == "done"


def test_the_profile_can_be_simulated(resumed: tuple[Profile, Any]) -> None:
    result = simulate_plan(resumed[0], PLAN)

    assert result["plan"]["tokens"] == 48
    assert result["plain"]["decode_ms_per_token"] > 2


def test_no_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompts"):
        profile_plan(PLAN, [], tmp_path / "p.json")


def test_a_folder_that_does_not_exist_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--out"):
        profile_plan(PLAN, PROMPTS, tmp_path / "none" / "p.json")


def test_a_prompt_that_leaves_no_room_for_an_output_is_named(tmp_path: Path) -> None:
    stage = {"model": "emulated", "name": "big", "emulated": {"ms": {1: 0}, "max_length": 16}}
    long = ProfilePrompt("epic", "chat", tuple(range(9)))
    with pytest.raises(ConfigError, match="epic"):
        profile_plan(Plan.parse({"chain": [stage]}), [long], tmp_path / "p.json", **QUICK)


def test_threads_go_up_to_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopipe.profile.run.usable_cores", lambda: 6)

    assert default_threads() == (1, 2, 4, 6)
