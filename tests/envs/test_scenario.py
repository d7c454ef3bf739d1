"""Scenario files: the shipped ones, the user's own, and what is wrong with bad ones."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan
from autopipe.envs.config import SpaceConfig
from autopipe.envs.menu import ActionCodec
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.scenario import Scenario, load_scenario, scenario_names
from tests.envs.scenes import DRAFTERS, pipeline, scenario


def test_eight_scenarios_ship() -> None:
    assert len(scenario_names()) == 8


@pytest.mark.parametrize("name", scenario_names())
def test_a_shipped_scenario_loads_and_says_what_it_is(name: str) -> None:
    found = load_scenario(name)
    assert found.name == name
    assert len(found.description) > 40


def test_the_shipped_scenarios_rehearse_every_kind_of_trouble() -> None:
    types = {event.type for name in scenario_names() for event in load_scenario(name).events}
    assert types == {"slow_down", "throttle", "drafter_dies", "drift", "contention", "memory_taken"}
    assert any(phase.arrivals_per_s for name in scenario_names() for phase in load_scenario(name).phases)


def test_a_file_of_ones_own_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(scenario().model_dump(mode="json")))
    assert load_scenario(path) == scenario()


def test_a_bad_key_in_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**scenario().model_dump(mode="json"), "phasen": []}))
    with pytest.raises(ConfigError, match=r"--scenario phasen.*no such key"):
        load_scenario(path)


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="stationary"):
        load_scenario("no-such-scenario")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"phases": []}, "phases"),
        ({"phases": [{"tokens": 10, "kinds": {"poetry": 1}}]}, "kinds"),
        ({"phases": [{"tokens": 10, "kinds": {"chat": 0}}]}, "kinds"),
        ({"phases": [{"tokens": 10, "kinds": {"chat": 1}, "output_tokens": {"low": 9, "high": 3}}]}, "low"),
        ({"pipeline": pipeline(drafters=[DRAFTERS[1], DRAFTERS[1]])}, "drafters"),
        ({"pipeline": pipeline(drafters=[DRAFTERS[1], DRAFTERS[0]])}, "ngram"),
        ({"pipeline": pipeline(drafters=[{**DRAFTERS[1], "agreement": {"code": 0.5}}])}, "agreement"),
        ({"pipeline": pipeline(drafters=[{**DRAFTERS[1], "agreement": {"other": 1.5}}])}, "agreement"),
        ({"pipeline": pipeline(target={"ms": {}})}, "ms"),
        ({"cycles": 0}, "cycles"),
    ],
)
def test_bad_scenarios_name_the_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        scenario(**changes)


def test_agreement_falls_back_to_other_and_adapters_replace_it() -> None:
    small = scenario().pipeline.drafters[1]
    assert small.agreement_on(PromptKind.CODE) == 0.8
    assert small.agreement_on(PromptKind.MATH) == 0.6
    assert small.agreement_on(PromptKind.CHAT, "chat") == 0.95
    assert small.agreement_on(PromptKind.CHAT, "no such adapter") == 0.6


def test_a_scenarios_menu_makes_plans_that_the_engine_accepts() -> None:
    codec = ActionCodec(SpaceConfig(), Scenario.parse(scenario().model_dump()).pipeline.menu())
    action = codec.off()
    action[0] = 0b111
    plan = Plan.parse(codec.plan(action).model_dump())
    assert plan.chain[0].is_ngram
    assert plan.target.is_emulated
