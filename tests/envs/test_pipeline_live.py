"""`AutoPipe/Pipeline-v0` over an engine whose stages are emulated."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from autopipe.core.engine import Engine
from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.plan import Plan
from autopipe.core.sampling import SamplingParams
from autopipe.envs import EnvConfig, LivePrompt, PipelineLiveEnv, PipelineSimEnv, PlanMenu, PromptKind
from tests.envs.scenes import emulated_plan, emulated_stage, scenario

CONFIG = EnvConfig(interval_tokens=16, max_steps=12)
PROMPTS = [LivePrompt(token_ids=(1, 2, 3), kind=PromptKind.CODE), LivePrompt(token_ids=(4, 5))]
BOTH = [0b11, 3, 4, 0, 0, 1, 0, 0]


def make(**kwargs: Any) -> PipelineLiveEnv:
    settings = {"plan": emulated_plan(), "prompts": PROMPTS, "config": CONFIG, "telemetry": False, **kwargs}
    return PipelineLiveEnv(**settings, params=SamplingParams(max_new_tokens=64))


@pytest.fixture(scope="module")
def shared() -> Iterator[PipelineLiveEnv]:
    env = make()
    yield env
    env.close()


def test_spaces_are_those_of_the_simulation(shared: PipelineLiveEnv) -> None:
    sim = PipelineSimEnv(scenario(), CONFIG)
    assert shared.observation_space == sim.observation_space
    assert shared.action_space == sim.action_space


def test_one_policy_runs_in_both_unchanged(shared: PipelineLiveEnv) -> None:
    def policy(observation: dict[str, np.ndarray], mask: np.ndarray) -> list[int]:
        chains = np.flatnonzero(mask[:8])
        best = chains[-1] if observation["goodput"][0] < 0.5 else chains[len(chains) // 2]
        return [int(best), 2, 2, 2, 0, 1, 0, 0]

    for env in (shared, PipelineSimEnv(scenario(), CONFIG)):
        observation, info = env.reset(seed=0)
        for _ in range(5):
            observation, reward, _, _, info = env.step(policy(observation, info["action_mask"]))
            assert observation in env.observation_space
            assert np.isfinite(reward)


def test_goodput_is_plain_decodings_time_over_the_time_measured(shared: PipelineLiveEnv) -> None:
    shared.reset(seed=0)
    for _ in range(5):
        info = shared.step(BOTH)[4]
        expected = min(info["plain_s"] / info["decode_s"], 10)
        assert info["reward_terms"]["goodput"] == pytest.approx(expected)
        assert info["plain_s"] > 0


def test_an_interval_has_at_least_its_tokens(shared: PipelineLiveEnv) -> None:
    shared.reset(seed=0)
    assert all(shared.step(BOTH)[4]["num_tokens"] >= CONFIG.interval_tokens for _ in range(5))


def test_acceptance_is_known_once_a_request_has_ended(shared: PipelineLiveEnv) -> None:
    observation, _ = shared.reset(seed=0)
    assert observation["acceptance_missing"].tolist() == [1, 1, 1]
    for _ in range(10):
        observation = shared.step(BOTH)[0]
    assert observation["acceptance_missing"].tolist() == [0, 0, 1]
    assert ((observation["acceptance_slow"][:2] > 0) & (observation["acceptance_slow"][:2] < 1)).all()


def test_step_times_are_known_from_the_start(shared: PipelineLiveEnv) -> None:
    observation, _ = shared.reset(seed=0)
    assert observation["step_time_missing"].tolist() == [0, 0, 1]
    assert observation["step_time"][0] < observation["step_time"][1] < 1


def test_the_prompt_kind_is_that_of_the_request_under_way(shared: PipelineLiveEnv) -> None:
    observation, _ = shared.reset(seed=0)
    kinds = {int(observation["prompt_kind"].argmax())}
    for _ in range(10):
        kinds.add(int(shared.step(BOTH)[0]["prompt_kind"].argmax()))
    assert kinds == {0, 4}


def test_missing_telemetry_is_flagged(shared: PipelineLiveEnv) -> None:
    assert shared.reset(seed=0)[0]["telemetry_missing"].tolist() == [1] * 5


def test_the_step_limit_truncates(shared: PipelineLiveEnv) -> None:
    shared.reset(seed=0)
    flags = [shared.step(shared.codec.off())[2:4] for _ in range(CONFIG.max_steps)]
    assert flags == [(False, False)] * (CONFIG.max_steps - 1) + [(False, True)]


def test_reset_in_the_middle_begins_anew_with_plain_decoding(shared: PipelineLiveEnv) -> None:
    shared.reset(seed=0)
    shared.step(BOTH)
    _, info = shared.reset(seed=1)
    assert info["action_in_force"].tolist() == shared.codec.off().tolist()
    assert shared.engine.plan.mode.value == "plain"


def test_a_slow_policy_makes_intervals_longer_and_delays_no_token(shared: PipelineLiveEnv) -> None:
    shared.reset(seed=0)
    shared.step(shared.codec.off())
    stream = shared._stream
    assert stream is not None
    deadline = time.monotonic() + 20
    while stream.num_ahead <= 2 * CONFIG.interval_tokens and time.monotonic() < deadline:
        time.sleep(0.01)
    assert shared.step(shared.codec.off())[4]["num_tokens"] > 2 * CONFIG.interval_tokens


def test_options_of_reset_are_refused(shared: PipelineLiveEnv) -> None:
    with pytest.raises(ConfigError, match="options"):
        shared.reset(options={"scenario": "drift"})


def test_ansi_shows_the_plan() -> None:
    env = make(render_mode="ansi")
    try:
        env.reset(seed=0)
        env.step(BOTH)
        assert "small(8) > medium(16) > target, async" in env.render()
    finally:
        env.close()


def test_the_end_of_the_requests_terminates() -> None:
    env = make(num_requests=1)
    try:
        env.reset(seed=0)
        flags = [(False, False)]
        while not any(flags[-1]):
            flags.append(env.step(BOTH)[2:4])
        assert flags[-1] == (True, False)
    finally:
        env.close()


def test_a_target_that_dies_truncates_and_the_next_episode_runs() -> None:
    env = make()
    try:
        env.reset(seed=0)
        os.kill(env.engine.worker_ids["target"], signal.SIGKILL)
        result: Any = None
        for _ in range(CONFIG.max_steps - 1):
            result = env.step(env.codec.off())
            if result[3]:
                break
        assert result[2:4] == (False, True)
        assert "target" in result[4]["error"]
        env.reset(seed=0)
        assert not env.step(env.codec.off())[3]
    finally:
        env.close()


def test_a_drafter_that_dies_is_masked() -> None:
    env = make()
    try:
        env.reset(seed=0)
        env.step(BOTH)
        os.kill(env.engine.worker_ids["medium"], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while "medium" in env.engine.worker_ids and time.monotonic() < deadline:
            time.sleep(0.01)
        assert env.action_masks()[:4].tolist() == [True, True, False, False]
    finally:
        env.close()


class Refusing(Engine):
    """An engine that cannot load the stage `other`."""

    def apply(self, plan: Plan, timeout_s: float | None = None) -> None:
        if "other" in plan.names():
            raise AutoPipeError("stage 'other' cannot be loaded")
        super().apply(plan, timeout_s)


def test_a_plan_that_cannot_be_loaded_is_rejected_and_masked() -> None:
    plan = emulated_plan(emulated_stage("other", 0.6), *emulated_plan().model_dump()["chain"][1:])
    menu = PlanMenu.from_plan(plan).replace(chains=(0b01, 0b10))
    env = PipelineLiveEnv(menu=menu, prompts=PROMPTS, config=CONFIG, telemetry=False, engine=Refusing(emulated_plan()))
    try:
        env.reset(seed=0)
        info = env.step([0b01, 2, 2, 2, 0, 0, 0, 0])[4]
        assert info["rejected"]
        assert not info["action_mask"][0b01]
        assert info["action_in_force"][0] == 0
    finally:
        env.close()
        env.engine.close()


def test_telemetry_of_its_own_ends_with_the_environment() -> None:
    env = make(telemetry=True)
    env.reset(seed=0)
    assert any(thread.name.startswith("telemetry-") for thread in threading.enumerate())
    env.close()
    assert not any(thread.name.startswith("telemetry-") for thread in threading.enumerate())


def test_an_engine_of_somebody_elses_stays_open() -> None:
    with Engine(emulated_plan()) as engine:
        env = make(engine=engine)
        env.reset(seed=0)
        env.close()
        handle = engine.submit([1, 2], SamplingParams(max_new_tokens=4))
        assert handle.outcome().finish_reason == "length"


def test_gymnasiums_and_stable_baselines_checkers_find_nothing() -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    kwargs = {"plan": emulated_plan(), "prompts": PROMPTS, "config": CONFIG, "telemetry": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make("AutoPipe/Pipeline-v0", **kwargs)
        check_env(env.unwrapped)
        again = gymnasium.make("AutoPipe/Pipeline-v0", **kwargs)
        checker.check_env(again)
        again.close()


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [
        ({"menu": PlanMenu.from_plan(emulated_plan())}, "plan"),
        ({"num_requests": 0}, "num_requests"),
        ({"prompts": []}, "prompts"),
    ],
)
def test_bad_arguments_name_the_key(kwargs: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make(**kwargs)
