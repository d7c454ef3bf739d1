"""What the Python API says of a generation: trace, times, energy, devices."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopipe import AutoPipe, Plan
from autopipe.core.errors import AutoPipeError
from autopipe.core.request import Outcome, TokenBlock
from autopipe.core.stats import RequestStats
from autopipe.core.telemetry import (
    DeviceInfo,
    DeviceKind,
    DeviceSnapshot,
    EnergyCounter,
    Sampler,
    TelemetrySource,
)

PROMPT = "The quick brown fox"


def test_a_trace_has_a_lane_per_stage(pipe: AutoPipe, tmp_path: Path) -> None:
    pipe.generate(PROMPT, max_new_tokens=12, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(names) == 1
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"prefill"}


def test_lanes_of_a_trace_come_in_the_order_of_the_chain(tmp_path: Path) -> None:
    stage = {"model": "emulated", "emulated": {"ms": {1: 0.5}}}
    names = ["c", "b", "a"]
    plan = Plan.parse({"chain": [{**stage, "name": name} for name in names], "mode": "async"})
    with AutoPipe.from_plan(plan) as pipe:
        pipe.generate("hello", max_new_tokens=9, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == names


def test_times_end_with_the_token_that_completed_a_stop_string(pipe: AutoPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that gives a token a second, and goes on for 100 s before it hears that it is to stop."""
    ids = pipe.encode("abcdef")

    class Handle:
        submitted_s, begun_s, first_token_s, last_token_s = 0.0, 0.5, 1.0, 0.0
        num_tokens = 0

        def __iter__(self) -> Iterator[TokenBlock]:
            for token in ids:
                self.num_tokens += 1
                self.last_token_s += 1.0
                yield TokenBlock([token])

        def cancel(self) -> None:
            pass

        def outcome(self) -> Outcome:
            return Outcome("cancelled", RequestStats(total_s=106.0, ttft_s=1.0, ms_per_token=17.0), {})

    monkeypatch.setattr(pipe.engine, "submit", lambda *_, **__: Handle())
    result = pipe.generate(PROMPT, stop=["d"])
    assert result.token_ids == ids[:4]
    assert (result.stats.total_s, result.stats.ttft_s, result.stats.ms_per_token) == (4.0, 1.0, 1000.0)


def test_to_dict_has_the_documented_shape(pipe: AutoPipe) -> None:
    data = json.loads(json.dumps(pipe.generate(PROMPT, max_new_tokens=5).to_dict()))
    assert set(data) == {"text", "token_ids", "finish_reason", "usage", "plan", "stats"}
    assert data["usage"] == {"prompt_tokens": len(pipe.encode(PROMPT)), "completion_tokens": 5}
    assert {"total_s", "ttft_s", "ms_per_token", "acceptance_length", "stages"} <= set(data["stats"])


class FiftyWatts(TelemetrySource):
    """A device that takes exactly 50 W."""

    name = "fifty"

    def open(self) -> None:
        pass

    def read(self) -> tuple[DeviceSnapshot, ...]:
        now_s = time.monotonic()
        device = DeviceInfo("fifty", DeviceKind.OTHER, "Fifty")
        return (DeviceSnapshot(device, now_s, utilisation=0.5, energy=EnergyCounter(50 * now_s)),)

    def close(self) -> None:
        pass


EMULATED = Plan.parse({"chain": [{"model": "emulated", "emulated": {"ms": {1: 2}}}], "mode": "plain"})


def test_stats_have_energy_per_token_by_device_and_in_total() -> None:
    with Sampler([FiftyWatts()], interval_s=0.1) as sampler, AutoPipe.from_plan(EMULATED, telemetry=sampler) as pipe:
        assert sampler.wait(20, sweeps=2)
        stats = pipe.generate("hello", max_new_tokens=40).stats
    assert stats.energy is not None
    assert stats.energy.num_tokens == 40
    assert stats.energy.total_j == pytest.approx(50 * stats.energy.duration_s)
    assert stats.energy.duration_s == pytest.approx(stats.total_s - stats.queued_s)
    energy, (device,) = stats.to_dict()["energy"], stats.to_dict()["devices"]
    assert energy["j_per_token"] == {"fifty": energy["total_j_per_token"]}
    assert (device["utilisation"], device["j_per_token"]) == (0.5, energy["total_j_per_token"])


def test_telemetry_off_leaves_energy_and_devices_none_and_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nobody asked for telemetry")

    monkeypatch.setattr("autopipe.core.telemetry.Sampler.start", refuse)
    monkeypatch.setattr("autopipe.core.telemetry.announce.Announcer.__init__", refuse)
    with AutoPipe.from_plan(EMULATED, telemetry=False) as pipe:
        stats = pipe.generate("hello", max_new_tokens=5).stats.to_dict()
    assert (stats["energy"], stats["devices"]) == (None, None)


def test_a_pipe_that_cannot_be_loaded_leaves_no_sampling_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr("autopipe.core.telemetry.SamplerLease.close", lambda lease: closed.append(lease))
    with pytest.raises(AutoPipeError):
        AutoPipe.from_pretrained("/no/such/folder")
    assert len(closed) == 1
