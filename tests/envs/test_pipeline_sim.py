"""`AutoPipe/PipelineSim-v0` as its users meet it."""

from __future__ import annotations

import random
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence

from autopipe.core.errors import ConfigError
from autopipe.envs import EnvConfig, PipelineSimEnv, Randomisation, scenario_names
from autopipe.envs.config import SpaceConfig
from tests.envs.scenes import pipeline, scenario

ENV_ID = "AutoPipe/PipelineSim-v0"


def make(**kwargs: Any) -> PipelineSimEnv:
    return PipelineSimEnv(**{"scenario": scenario(), **kwargs})


def rollout(env: PipelineSimEnv, seed: int, actions: list[Any]) -> list[Any]:
    found: list[Any] = [env.reset(seed=seed)]
    return found + [env.step(action) for action in actions]


def some_actions(env: PipelineSimEnv, count: int = 30) -> list[Any]:
    env.action_space.seed(7)
    return [env.action_space.sample() for _ in range(count)]


@pytest.mark.parametrize("name", scenario_names())
def test_gymnasiums_checker_finds_nothing(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(ENV_ID, scenario=name).unwrapped)


@pytest.mark.parametrize("name", scenario_names())
def test_stable_baselines_checker_finds_nothing(name: str) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(gymnasium.make(ENV_ID, scenario=name))


def test_the_same_seed_and_actions_give_the_same_episode() -> None:
    env, other = make(), make()
    actions = some_actions(env)
    assert data_equivalence(rollout(env, 5, actions), rollout(other, 5, actions))
    assert data_equivalence(rollout(env, 5, actions), rollout(other, 5, actions))


def test_another_seed_gives_another_episode() -> None:
    env = make()
    actions = some_actions(env)
    assert not data_equivalence(rollout(env, 5, actions), rollout(env, 6, actions))


def test_global_random_states_are_neither_read_nor_changed() -> None:
    env = make(randomisation=Randomisation.for_training())
    actions = some_actions(env)
    np.random.seed(1)
    random.seed(1)
    first, left = rollout(env, 5, actions), (np.random.random(), random.random())
    np.random.seed(1)
    random.seed(1)
    assert left == (np.random.random(), random.random())
    np.random.seed(2)
    random.seed(2)
    assert data_equivalence(first, rollout(env, 5, actions))


def test_the_end_of_the_work_terminates_and_does_not_truncate() -> None:
    env = make(config=EnvConfig(max_steps=10_000))
    env.reset(seed=0)
    flags = [(False, False)]
    while not any(flags[-1]):
        flags.append(env.step(env.codec.off())[2:4])
    assert flags[-1] == (True, False)
    assert len(flags) - 1 == -(-2000 // 32)


def test_the_step_limit_truncates_and_does_not_terminate() -> None:
    env = make(config=EnvConfig(max_steps=3))
    env.reset(seed=0)
    assert [env.step(env.codec.off())[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


def test_work_that_ends_with_the_last_step_terminates() -> None:
    env = make(config=EnvConfig(max_steps=63))
    env.reset(seed=0)
    flags = [env.step(env.codec.off())[2:4] for _ in range(63)]
    assert flags[-1] == (True, False)


def test_stepping_past_the_end_is_refused() -> None:
    env = make(config=EnvConfig(max_steps=1))
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(env.codec.off())
    env.reset(seed=0)
    env.step(env.codec.off())
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(env.codec.off())


def test_the_reward_is_the_sum_of_its_terms() -> None:
    env = make()
    for result in rollout(env, 0, some_actions(env))[1:]:
        assert result[1] == pytest.approx(sum(result[4]["reward_terms"].values()))


def test_a_good_plan_earns_more_than_plain_decoding() -> None:
    env = make()
    good = [0b100, 2, 2, 2, 0, 0, 0, 0]
    plain = np.mean([step[1] for step in rollout(env, 0, [env.codec.off()] * 20)[1:]])
    assert np.mean([step[1] for step in rollout(env, 0, [good] * 20)[1:]]) > plain + 0.5


def test_a_masked_action_changes_nothing_and_is_charged() -> None:
    env = make(scenario=scenario(pipeline=pipeline(device_memory_gb=7)))
    env.reset(seed=0)
    assert not env.action_masks()[0b110]
    info = env.step([0b110, 2, 2, 2, 0, 0, 0, 0])[4]
    assert info["rejected"]
    assert info["reward_terms"]["rejected"] < 0
    assert info["action_in_force"].tolist() == env.codec.off().tolist()


def test_an_adapter_that_is_not_on_the_menu_is_masked() -> None:
    env = make(config=EnvConfig(spaces=SpaceConfig(adapter_slots=2)))
    env.reset(seed=0)
    assert env.action_masks()[-3:].tolist() == [True, True, False]
    assert env.step([0b010, 2, 2, 2, 0, 0, 0, 2])[4]["action_in_force"][0] == 0


def test_the_mask_follows_events() -> None:
    death = {"type": "drafter_dies", "stage": "small", "start": 64, "end": 128}
    env = make(scenario=scenario(events=[death]))
    env.reset(seed=0)
    masks = [env.step(env.codec.off())[4]["action_mask"][0b010] for _ in range(6)]
    assert [bool(mask) for mask in masks] == [True, True, False, False, True, True]


def test_switching_and_retuning_are_told_apart() -> None:
    env = make()
    env.reset(seed=0)
    infos = [
        env.step(action)[4] for action in ([2, 2, 2, 2, 0, 0, 0, 0], [2, 2, 3, 2, 0, 0, 0, 0], [2, 0, 3, 0, 1, 0, 0, 0])
    ]
    assert [(info["switched"], info["retuned"]) for info in infos] == [(True, False), (False, True), (False, False)]


def test_bad_actions_are_refused() -> None:
    env = make()
    env.reset(seed=0)
    with pytest.raises(ConfigError, match="action"):
        env.step([99, 0, 0, 0, 0, 0, 0, 0])


def test_several_scenarios_share_the_spaces_and_are_drawn_by_the_seed() -> None:
    env = PipelineSimEnv(["stationary", "drift", "rush-hour"])
    names = set()
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        assert observation in env.observation_space
        names.add(env.world.scenario.name)
    assert names == {"stationary", "drift", "rush-hour"}


def test_a_scenario_may_be_chosen_for_one_episode() -> None:
    env = make()
    env.reset(seed=0, options={"scenario": "drift"})
    assert env.world.scenario.name == "drift"
    env.reset(seed=0)
    assert env.world.scenario.name == "test"


@pytest.mark.parametrize(("kwargs", "key"), [({"scenario": []}, "scenario"), ({"render_mode": "human"}, "render_mode")])
def test_bad_arguments_name_the_key(kwargs: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make(**kwargs)


def test_an_unknown_reset_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"options\.colour"):
        make().reset(options={"colour": "red"})


def test_a_forecast_is_what_then_happens() -> None:
    env = make()
    env.reset(seed=0)
    action = [0b110, 2, 3, 2, 1, 1, 0, 0]
    forecast = env.forecast(action)
    info = env.step(action)[4]
    assert info["plain_s"] / info["decode_s"] == pytest.approx(forecast)


def test_forecasts_change_nothing() -> None:
    env, other = make(), make()
    env.reset(seed=0)
    other.reset(seed=0)
    for chain in range(8):
        env.forecast([chain, 2, 2, 2, 0, 0, 0, 0], num_intervals=3)
    assert data_equivalence(env.step(env.codec.off()), other.step(env.codec.off()))


def test_maskable_ppo_learns_from_it() -> None:
    contrib = pytest.importorskip("sb3_contrib")
    env = gymnasium.make(ENV_ID, scenario=scenario(), config=EnvConfig(max_steps=32))
    model = contrib.MaskablePPO("MultiInputPolicy", env, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
    model.learn(64)
    observation, _ = env.reset(seed=0)
    action, _ = model.predict(observation, action_masks=env.unwrapped.action_masks())  # type: ignore[attr-defined]
    assert env.action_space.contains(action)
