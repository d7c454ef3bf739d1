"""The page on environments names every key, and its example works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from autopipe.envs import events
from autopipe.envs.config import EnvConfig, LatencyTargets, RewardWeights, SpaceConfig
from autopipe.envs.scenario import DrafterModel, Phase, PipelineModel, Scenario, load_scenario, scenario_names

PAGE = (Path(__file__).parents[2] / "docs/envs.md").read_text(encoding="utf-8")
EVENTS = [
    getattr(events, name) for name in ("SlowDown", "Throttle", "DrafterDies", "Drift", "Contention", "MemoryTaken")
]


@pytest.mark.parametrize(
    "model",
    [EnvConfig, SpaceConfig, RewardWeights, LatencyTargets, Scenario, PipelineModel, DrafterModel, Phase, *EVENTS],
)
def test_the_page_lists_every_key(model: type[BaseModel]) -> None:
    assert set(model.model_fields) <= set(re.findall(r"`(\w+)`", PAGE))


def test_the_page_lists_every_scenario_and_event() -> None:
    assert set(scenario_names()) <= set(re.findall(r"`([\w-]+)`", PAGE))
    assert {event.model_fields["type"].default for event in EVENTS} <= set(re.findall(r"`(\w+)`", PAGE))


def test_the_weights_of_the_page_are_the_defaults() -> None:
    for name, field in RewardWeights.model_fields.items():
        assert f"| `{name}` | {field.default} |" in PAGE


def test_the_example_of_the_page_is_a_scenario(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(example)
    assert load_scenario(path).name == "mine"
