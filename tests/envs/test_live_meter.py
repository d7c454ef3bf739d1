"""What the meter makes of blocks, request ends and energy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import RequestStats, StageReport
from autopipe.envs.config import SpaceConfig
from autopipe.envs.live_meter import LiveMeter
from autopipe.envs.menu import ActionCodec, PlanMenu
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.stream import Block, LiveRequest, RequestEnd
from tests.envs.scenes import emulated_plan

REQUEST = LiveRequest((1, 2, 3), PromptKind.CODE, SamplingParams(max_new_tokens=50))


class Idle:
    """What a meter asks an engine for, between requests."""

    def progress(self) -> tuple[int, list[StageReport]] | None:
        return None

    def load_factor(self) -> float:
        return 1.0


@pytest.fixture
def meter() -> LiveMeter:
    codec = ActionCodec(SpaceConfig(), PlanMenu.from_plan(emulated_plan()))
    engine: Any = Idle()
    return LiveMeter(engine, codec, telemetry=False, device=None)


ACTION = np.array([0b11, 2, 2, 2, 0, 1, 0, 0])


def block(since_s: float, num_tokens: int, position: int, *, is_first: bool = False) -> Block:
    return Block(REQUEST, 0, 0.0, since_s, num_tokens, position, is_first)


def report(name: str, **changes: Any) -> StageReport:
    zeros = {"accepted": 0, "acceptance_rate": None, "emitted": 0, "waiting_s": 0.0, "overhead_s": 0.0, "bytes_out": 0}
    figures = {"forwards": 11, "proposed": 0, "rollbacks": 0, "busy_s": 0.0, "catch_up_s": 0.0, **zeros, **changes}
    return StageReport(name=name, **figures)


def test_first_blocks_count_as_first_tokens_and_not_as_decoding(meter: LiveMeter) -> None:
    interval = meter.measure([block(2.0, 1, 1, is_first=True), block(0.1, 4, 5)], ACTION, plain=False)
    assert (interval.num_tokens, interval.decode_tokens, interval.decode_s) == (5, 4, 0.1)
    assert interval.ttfts_s == [2.0]
    assert (interval.position, interval.max_new_tokens, interval.context_tokens) == (5, 50, 8)


def test_only_plain_intervals_say_what_plain_decoding_takes(meter: LiveMeter) -> None:
    meter.measure([block(0.1, 1, 2)], ACTION, plain=True)
    assert meter.measure([block(0.05, 1, 3)], ACTION, plain=False).relative_goodput == pytest.approx(2.0)
    meter.measure([block(0.3, 1, 4)], ACTION, plain=True)
    assert meter.measure([block(0.05, 1, 5)], ACTION, plain=False).relative_goodput == pytest.approx(4.0)


def test_stage_figures_go_to_the_slot_of_their_name(meter: LiveMeter) -> None:
    stages = [
        report("small", proposed=40, accepted=20, rollbacks=3, busy_s=0.5, catch_up_s=0.3),
        report("medium", proposed=10, accepted=9, forwards=6),
        report("target", forwards=4, busy_s=1.0, catch_up_s=0.4),
    ]
    slots = meter.measure([RequestEnd(7, 0, RequestStats(stages=stages))], ACTION, plain=False).slots
    assert slots.proposed.tolist() == [40, 10, 0]
    assert slots.accepted.tolist() == [20, 9, 0]
    assert slots.room.tolist() == [5 * 4, 3 * 4, 0]
    assert slots.rollbacks.tolist() == [3, 0, 0]
    assert slots.step_s.tolist() == pytest.approx([0.02, 0, 0, 0.2])


def test_an_engine_that_reports_progress_is_not_counted_twice(meter: LiveMeter) -> None:
    class Reporting(Idle):
        def progress(self) -> tuple[int, list[StageReport]]:
            return 7, [report("small", proposed=10, accepted=5), report("target", forwards=5)]

    meter._engine = Reporting()  # type: ignore[assignment]
    first = meter.measure([block(0.1, 4, 5)], ACTION, plain=False).slots
    again = meter.measure([block(0.1, 4, 9)], ACTION, plain=False).slots
    meter._engine = Idle()  # type: ignore[assignment]
    stages = [report("small", proposed=40, accepted=20), report("target", forwards=9)]
    end = meter.measure([RequestEnd(7, 0, RequestStats(stages=stages))], ACTION, plain=False).slots
    assert [slots.proposed[0] for slots in (first, again, end)] == [10, 0, 30]
    assert [slots.room[0] for slots in (first, again, end)] == [4 * 4, 0, 4 * 4]


def test_a_request_of_which_no_stage_has_reported_yet_counts_for_nothing(meter: LiveMeter) -> None:
    class Begun(Idle):
        def progress(self) -> tuple[int, list[StageReport]]:
            return 8, []

    meter._engine = Begun()  # type: ignore[assignment]
    slots = meter.measure([block(0.1, 1, 2)], ACTION, plain=False).slots
    assert not slots.proposed.any()
    assert not slots.step_s.any()


def test_energy_without_telemetry_is_unknown(meter: LiveMeter) -> None:
    interval = meter.measure([block(0.1, 1, 2)], ACTION, plain=True)
    assert (interval.energy_j, interval.plain_energy_j) == (None, None)


def test_telemetry_that_is_off_knows_nothing(meter: LiveMeter) -> None:
    assert meter.device_figures().utilisation is None
    assert meter.memory_total_bytes() is None
