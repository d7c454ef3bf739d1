"""Flattening, history and normalisation, and masks through all of them."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest

from autopipe.core.errors import ConfigError
from autopipe.envs import EnvConfig, PipelineSimEnv, flatten, normalise, stack_history
from tests.envs.scenes import scenario

WRAPPED = {
    "flatten": flatten,
    "stack": lambda env: stack_history(env, 4),
    "normalise": lambda env: normalise(flatten(env)),
    "all": lambda env: normalise(stack_history(env, 3)),
}


def make() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("AutoPipe/PipelineSim-v0", scenario=scenario(), config=EnvConfig(max_steps=20))


def num_numbers() -> int:
    return int(sum(box.shape[0] for box in make().observation_space.values()))  # type: ignore[attr-defined]


def test_flat_observations_hold_every_number() -> None:
    observation, _ = flatten(make()).reset(seed=0)
    assert observation.shape == (num_numbers(),)


def test_history_holds_the_newest_observation_last() -> None:
    env, plain = stack_history(make(), 4), flatten(make())
    env.reset(seed=0)
    plain.reset(seed=0)
    action = [2, 2, 2, 2, 0, 0, 0, 0]
    stacked, single = env.step(action)[0], plain.step(action)[0]
    assert stacked.shape == (4 * num_numbers(),)
    assert stacked[-num_numbers() :].tolist() == single.tolist()


def test_a_history_of_one_is_the_flat_observation() -> None:
    assert stack_history(make(), 1).observation_space == flatten(make()).observation_space


def test_an_empty_history_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_steps"):
        stack_history(make(), 0)


def test_normalised_observations_become_centred() -> None:
    env = normalise(flatten(make()))
    seen = []
    for seed in range(5):
        env.reset(seed=seed)
        seen += [env.step(env.action_space.sample())[0] for _ in range(20)]
    assert abs(np.mean(seen)) < 0.3


def test_dictionaries_are_flattened_before_they_are_normalised() -> None:
    with pytest.raises(ConfigError, match="flatten"):
        normalise(make())


@pytest.mark.parametrize("name", WRAPPED)
def test_masks_reach_through(name: str) -> None:
    env = WRAPPED[name](make())
    env.reset(seed=0)
    inner = env.unwrapped
    assert isinstance(inner, PipelineSimEnv)
    assert env.action_masks().tolist() == inner.action_masks().tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", WRAPPED)
def test_stable_baselines_checker_finds_nothing(name: str) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(WRAPPED[name](make()))
