"""Domain randomisation."""

import numpy as np
import pytest

from autopipe.envs.randomise import Randomisation, randomise
from autopipe.envs.scenario import Scenario, load_scenario, scenario_names
from tests.envs.scenes import scenario


def test_without_spread_nothing_changes_and_nothing_is_drawn() -> None:
    rng = np.random.default_rng(0)
    assert randomise(scenario(), Randomisation(), rng) is not None
    assert randomise(scenario(), Randomisation(), rng) == scenario()
    assert rng.random() == np.random.default_rng(0).random()


def test_the_same_state_draws_the_same_scenario() -> None:
    spread = Randomisation.for_training()
    one, other = (randomise(scenario(), spread, np.random.default_rng(3)) for _ in range(2))
    assert one == other
    assert one != randomise(scenario(), spread, np.random.default_rng(4))


def test_each_spread_changes_its_own_part() -> None:
    original = load_scenario("rush-hour")
    faster = randomise(original, Randomisation(latency=0.5), np.random.default_rng(0))
    assert faster.pipeline.target.ms != original.pipeline.target.ms
    assert faster.pipeline.drafters[1].agreement == original.pipeline.drafters[1].agreement
    busier = randomise(original, Randomisation(load=0.5), np.random.default_rng(0))
    assert busier.phases[0].arrivals_per_s != original.phases[0].arrivals_per_s
    assert busier.pipeline.target == original.pipeline.target


@pytest.mark.parametrize("name", scenario_names())
def test_what_comes_out_is_a_valid_scenario(name: str) -> None:
    for seed in range(5):
        found = randomise(load_scenario(name), Randomisation.for_training(), np.random.default_rng(seed))
        Scenario.parse(found.model_dump())
