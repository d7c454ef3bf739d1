"""Pictures of an environment."""

from __future__ import annotations

import numpy as np
import pytest

from autopipe.envs import PipelineSimEnv
from tests.envs.scenes import scenario

ACTION = [0b110, 2, 3, 2, 1, 1, 0, 0]


def test_ansi_shows_plan_goodput_and_acceptance() -> None:
    env = PipelineSimEnv(scenario(), render_mode="ansi")
    env.reset(seed=0)
    for _ in range(4):
        env.step(ACTION)
    text = env.render()
    assert "small(8) > medium(4) > target, async, min 2" in text
    assert "x plain decoding" in text
    assert "acceptance medium" in text
    assert "step 4  chat" in text


def test_ansi_says_what_is_not_known() -> None:
    env = PipelineSimEnv(scenario(), render_mode="ansi")
    env.reset(seed=0)
    assert "not measured" in env.render()


def test_rgb_array_is_a_picture_that_changes() -> None:
    env = PipelineSimEnv(scenario(), render_mode="rgb_array")
    env.reset(seed=0)
    before = env.render()
    env.step(ACTION)
    after = env.render()
    assert (before.shape, before.dtype) == ((540, 960, 3), np.uint8)
    assert (before != after).any()


def test_the_timeline_marks_forwards_with_rejected_drafts() -> None:
    pytest.importorskip("matplotlib")
    env = PipelineSimEnv(scenario(), render_mode="rgb_array")
    env.reset(seed=0)
    for _ in range(3):
        env.step(ACTION)
    picture = env.render()[:270].astype(int)
    orange = (abs(picture - [255, 127, 14]) < 20).all(axis=-1)
    blue = (abs(picture - [31, 119, 180]) < 20).all(axis=-1)
    assert orange.sum() > 100
    assert blue.sum() > 100


def test_rendering_without_a_mode_warns() -> None:
    env = PipelineSimEnv(scenario())
    env.reset(seed=0)
    with pytest.warns(UserWarning, match="render_mode"):
        assert env.render() is None
