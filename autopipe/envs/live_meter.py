"""Measures control intervals of a live engine: time, stages, energy and telemetry."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.core.live_engine import LiveEngine
from autopipe.core.plan import StagePlan
from autopipe.core.stats import StageReport
from autopipe.core.telemetry import DeviceSnapshot, EnergyMeter, Sampler, SamplerLease
from autopipe.envs.interval import DeviceFigures, Interval, SlotFigures
from autopipe.envs.menu import Action, ActionCodec
from autopipe.envs.stream import Block, RequestEnd

_NEWEST_SHARE = 0.5
"""Weight of a new measurement of plain decoding against the old figure."""


class LiveMeter:
    """Turns what the stream delivers into `Interval`s.

    Args:
        telemetry: a running sampler, True for the one that the process shares, False for none.
        device: telemetry's label of the target's device; None: guessed from its plan.
    """

    def __init__(self, engine: LiveEngine, codec: ActionCodec, telemetry: Sampler | bool, device: str | None) -> None:
        self._engine = engine
        self._codec = codec
        self._lease = SamplerLease() if telemetry is True else None
        self._sampler: Sampler | None = None if isinstance(telemetry, bool) else telemetry
        if self._lease is not None:
            self._sampler = self._lease.sampler
        self._device = device
        self._plain_token_s: float | None = None
        self._plain_token_j: float | None = None
        self._energy: EnergyMeter | None = None
        self._request = 0
        self._heard: dict[str, StageReport] = {}

    def close(self) -> None:
        """Stop sampling, where it is this meter's own. May be called more than once."""
        if self._lease is not None:
            self._lease.close()
        self._sampler = None

    @property
    def sampler(self) -> Sampler | None:
        """Where telemetry comes from; None without telemetry."""
        return self._sampler

    @property
    def calibrated(self) -> bool:
        """Whether plain decoding has been measured."""
        return self._plain_token_s is not None

    def begin(self) -> None:
        """Energy counts from here on."""
        self._energy = None if self._sampler is None else self._sampler.measure_energy()

    def measure(self, items: Sequence[Block | RequestEnd], action: Action, *, plain: bool) -> Interval:
        """The interval that consists of `items`, with `action` in force at its end.

        Args:
            plain: all of it was plain decoding, so it says what plain decoding takes.
        """
        interval = Interval(slots=self.no_figures())
        for item in items:
            if isinstance(item, RequestEnd):
                self._count_stages(interval.slots, item.id, item.stats.stages, action)
                continue
            interval.num_tokens += item.num_tokens
            if item.is_first:
                interval.ttfts_s.append(item.since_s)
            else:
                interval.decode_tokens += item.num_tokens
                interval.decode_s += item.since_s
            interval.position, interval.max_new_tokens = item.position, item.request.params.max_new_tokens
            interval.context_tokens = len(item.request.token_ids) + item.position
            interval.kind = item.request.kind
        under_way = self._engine.progress()
        if under_way is not None:
            self._count_stages(interval.slots, *under_way, action)
        self._compare_with_plain(interval, plain=plain)
        interval.device = self.device_figures()
        return interval

    def no_figures(self) -> SlotFigures:
        return SlotFigures.zeros(self._codec.num_slots)

    def device_figures(self) -> DeviceFigures:
        """Telemetry of the target's device; all unknown without telemetry."""
        found = self._snapshot()
        if found is None:
            return DeviceFigures()
        power = None
        if found.power_w is not None and found.power_limit_w:
            power = found.power_w / found.power_limit_w
        return DeviceFigures(
            utilisation=found.utilisation,
            memory=found.memory_share,
            power=power,
            temperature_c=found.temperature_c,
            throttled=None if found.throttled is None else float(found.throttled),
        )

    def memory_total_bytes(self) -> int | None:
        """Memory of the target's device, where telemetry knows it."""
        found = self._snapshot()
        return None if found is None else found.memory_total_bytes

    def known_step_s(self, num_slots: int) -> list[float | None]:
        """Seconds of a single-token step by slot, the target's last, as measured at loading; None: not known."""
        stages = [option.stage for option in self._codec.menu.drafters]
        known = [self._step_s(stage, name, 1) for stage, name in zip(stages, self._codec.slot_names(), strict=True)]
        target = self._codec.menu.target
        return [*known, *[None] * (num_slots - len(known)), self._step_s(target, self._target_name(), 1)]

    def verify_ratio(self) -> float:
        """The target's forward of eight tokens relative to one; 1 where it is not known."""
        target, name = self._codec.menu.target, self._target_name()
        one, eight = self._step_s(target, name, 1), self._step_s(target, name, 8)
        return eight / one if one and eight else 1.0

    # -- parts ----------------------------------------------------------------------------------------------

    def _target_name(self) -> str:
        return self._engine.plan.names()[-1]

    def _step_s(self, stage: StagePlan, name: str, num_tokens: int) -> float | None:
        if stage.is_ngram:
            return 1e-6
        if stage.emulated is not None:
            sizes = [size for size in stage.emulated.ms if size <= num_tokens] or [min(stage.emulated.ms)]
            return max(stage.emulated.ms[max(sizes)] / 1e3, 1e-9)
        measured = self._engine.facts(name).get("step_ms", {})
        milliseconds = measured.get(num_tokens, measured.get(str(num_tokens)))
        return None if milliseconds is None else float(milliseconds) / 1e3

    def _snapshot(self) -> DeviceSnapshot | None:
        if self._sampler is None:
            return None
        snapshot = self._sampler.snapshot()
        if self._device is not None:
            return snapshot.get(self._device)
        target = self._codec.menu.target
        if target.is_emulated or target.device == "cpu":
            return snapshot.get("cpu")
        label = "cuda:0" if target.device in ("auto", "cuda") else target.device
        return snapshot.get(label) or (snapshot.get("cpu") if target.device == "auto" else None)

    def _compare_with_plain(self, interval: Interval, *, plain: bool) -> None:
        """Fill in what plain decoding takes; where the interval ran plain, learn it first."""
        use = None if self._energy is None else self._energy.stop(interval.num_tokens)
        energy_j = None if use is None else use.total_j
        self.begin()
        factor = self._engine.load_factor()
        if plain and interval.decode_tokens:
            self._plain_token_s = _mixed(self._plain_token_s, interval.decode_s / interval.decode_tokens / factor)
            if energy_j is not None and interval.num_tokens:
                self._plain_token_j = _mixed(self._plain_token_j, energy_j / interval.num_tokens)
        interval.plain_s = interval.decode_tokens * (self._plain_token_s or 0.0) * factor
        interval.energy_j = energy_j
        if self._plain_token_j is not None:
            interval.plain_energy_j = interval.num_tokens * self._plain_token_j

    def _count_stages(self, figures: SlotFigures, request: int, reports: Sequence[StageReport], action: Action) -> None:
        """Add what stages have done in a request since they were last heard of.

        A stage that the menu does not name is left out.
        """
        if request != self._request:
            self._request, self._heard = request, {}
        slot_of = {name: slot for slot, name in enumerate(self._codec.slot_names())}
        windows = np.array(self._codec.spaces.windows)[action[1 : 1 + self._codec.num_slots]]
        new = [_since(report, self._heard.get(report.name)) for report in reports]
        self._heard.update({report.name: report for report in reports})
        for report, consumer in itertools.zip_longest(new, new[1:]):  # none yet, where a request has just begun
            slot = self._codec.num_slots if consumer is None else slot_of.get(report.name)
            if slot is None:
                continue
            if report.steps > 0 and report.step_s > 0:
                figures.step_s[slot] = report.step_s / report.steps
            if consumer is not None:
                figures.proposed[slot] += report.proposed
                figures.accepted[slot] += report.accepted
                figures.room[slot] += consumer.steps * windows[slot]
                figures.rollbacks[slot] += report.rollbacks


@dataclass(frozen=True, slots=True)
class _Progress:
    """What a stage has done since it was last heard of; `steps` and `step_s` without catching up."""

    name: str
    steps: int
    step_s: float
    proposed: int
    accepted: int
    rollbacks: int


def _since(report: StageReport, before: StageReport | None) -> _Progress:
    """The difference of two reports; a stage not heard of before had its prefill among its forwards."""
    seconds = report.busy_s - report.catch_up_s
    if before is None or before.forwards > report.forwards:  # a new request, or a worker that was started again
        return _Progress(report.name, report.forwards - 1, seconds, report.proposed, report.accepted, report.rollbacks)
    return _Progress(
        report.name,
        report.forwards - before.forwards,
        seconds - (before.busy_s - before.catch_up_s),
        max(report.proposed - before.proposed, 0),
        max(report.accepted - before.accepted, 0),
        max(report.rollbacks - before.rollbacks, 0),
    )


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST_SHARE * (new - old)
