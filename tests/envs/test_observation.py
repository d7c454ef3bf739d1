"""Observations: averages, scales and missing flags."""

import numpy as np
import pytest

from autopipe.envs.config import EnvConfig
from autopipe.envs.interval import DeviceFigures, Interval, SlotFigures
from autopipe.envs.menu import ActionCodec
from autopipe.envs.observation import Observation, Observer, observation_sizes
from autopipe.envs.prompt_kinds import PromptKind
from tests.envs.scenes import scenario

CONFIG = EnvConfig(fast_intervals=1, slow_intervals=4)


@pytest.fixture
def codec() -> ActionCodec:
    return ActionCodec(CONFIG.spaces, scenario().pipeline.menu())


@pytest.fixture
def observer(codec: ActionCodec) -> Observer:
    return Observer(CONFIG, codec, [None, 0.001, 0.003, 0.010], verify_ratio=1.2)


def interval(proposed: float = 0, accepted: float = 0, **changes: object) -> Interval:
    slots = SlotFigures.zeros(3)
    slots.proposed[1], slots.accepted[1] = proposed, accepted
    return Interval(num_tokens=32, slots=slots, **changes)  # type: ignore[arg-type]


def observe(observer: Observer, codec: ActionCodec, *intervals: Interval) -> Observation:
    for each in intervals:
        observer.update(each)
    return observer.observe(intervals[-1], codec.off())


def test_parts_and_lengths_are_those_documented(observer: Observer, codec: ActionCodec) -> None:
    found = observe(observer, codec, interval())
    assert {name: len(part) for name, part in found.items()} == observation_sizes(CONFIG)
    assert all(part.dtype == np.float32 for part in found.values())


def test_what_never_proposed_is_missing(observer: Observer, codec: ActionCodec) -> None:
    found = observe(observer, codec, interval(10, 5))
    assert found["acceptance_missing"].tolist() == [1, 0, 1]
    assert found["acceptance_fast"].tolist() == [0, 0.5, 0]


def test_the_fast_average_follows_faster(observer: Observer, codec: ActionCodec) -> None:
    found = observe(observer, codec, *[interval(10, 9)] * 8, interval(10, 1), interval(10, 1))
    assert found["acceptance_fast"][1] < found["acceptance_slow"][1] < 0.9


def test_acceptance_is_weighted_by_proposals(observer: Observer, codec: ActionCodec) -> None:
    found = observe(observer, codec, interval(1000, 900), interval(1, 0))
    assert found["acceptance_fast"][1] > 0.85


def test_an_unused_slot_keeps_its_figures(observer: Observer, codec: ActionCodec) -> None:
    found = observe(observer, codec, interval(10, 7), *[interval()] * 20)
    assert found["acceptance_fast"][1] == pytest.approx(0.7)


def test_step_times_are_relative_to_the_target(observer: Observer, codec: ActionCodec) -> None:
    found = observe(observer, codec, interval())
    assert found["step_time"].tolist() == pytest.approx([0, 0.1, 0.3])
    assert found["step_time_missing"].tolist() == [1, 0, 0]
    assert found["target_step"][0] == pytest.approx(0.5)  # 10 ms lies halfway between 0.01 ms and 10 s


def test_measured_step_times_replace_what_was_known(observer: Observer, codec: ActionCodec) -> None:
    measured = interval()
    measured.slots.step_s[:] = [0.002, 0.002, 0, 0]
    found = observe(observer, codec, *[measured] * 20)
    assert found["step_time"].tolist() == pytest.approx([0.2, 0.2, 0.3], abs=1e-3)


def test_missing_telemetry_is_flagged(observer: Observer, codec: ActionCodec) -> None:
    found = observe(observer, codec, interval(device=DeviceFigures(utilisation=0.5, temperature_c=60)))
    assert found["telemetry"].tolist() == pytest.approx([0.5, 0, 0, 0.6, 0])
    assert found["telemetry_missing"].tolist() == [0, 1, 1, 0, 1]


def test_goodput_starts_at_plain_and_follows(observer: Observer, codec: ActionCodec) -> None:
    fast = interval(decode_tokens=32, decode_s=0.16, plain_s=0.32)
    assert observer.observe(fast, codec.off())["goodput"].tolist() == [0.25, 0.25]
    assert observe(observer, codec, *[fast] * 60)["goodput"].tolist() == pytest.approx([0.5, 0.5], abs=1e-3)


def test_extremes_stay_within_the_bounds(observer: Observer, codec: ActionCodec) -> None:
    wild = interval(
        1e9,
        1e9,
        decode_tokens=1,
        decode_s=1e-12,
        plain_s=1e9,
        position=10**9,
        context_tokens=10**9,
        queue=10**9,
        device=DeviceFigures(5.0, 5.0, 5.0, 500.0, 1.0),
    )
    wild.slots.rollbacks[:] = 1e9
    wild.slots.room[:] = 1.0
    wild.slots.step_s[:] = [1e9, 0, 0, 1e-12]
    for part in observe(observer, codec, wild).values():
        assert ((part >= 0) & (part <= 1)).all()


def test_the_prompt_kind_is_one_hot(observer: Observer, codec: ActionCodec) -> None:
    found = observe(observer, codec, interval(kind=PromptKind.SUMMARY))
    assert found["prompt_kind"].tolist() == [0, 0, 1, 0, 0]


def test_observations_do_not_share_memory(observer: Observer, codec: ActionCodec) -> None:
    first = observe(observer, codec, interval(10, 5))
    kept = first["acceptance_fast"].copy()
    observe(observer, codec, interval(10, 0))
    assert first["acceptance_fast"].tolist() == kept.tolist()
