"""From an action, the conditions and a request to the chain that the simulator runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopipe.core.plan import Mode, Warmup
from autopipe.envs.events import Conditions
from autopipe.envs.menu import NO_ADAPTER, OFF, Action, ActionCodec, slots_of
from autopipe.envs.scenario import DrafterModel, PipelineModel, StageModel
from autopipe.envs.simulator import LatencyCurve, LocalDrafts, SimChain, SimStage
from autopipe.envs.workload import Request

Codes = NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in the chain that computes: which slot (the target's is the number of slots), with which adapter."""

    slot: int
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class _TabulatedCurve(LatencyCurve):
    """A latency curve that keeps its table, because windows change far more often than latencies."""

    known: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    def table(self, max_tokens: int) -> NDArray[np.float64]:
        if max_tokens not in self.known:
            self.known[max_tokens] = LatencyCurve.table(self, max_tokens)
        return self.known[max_tokens]


class ChainFactory:
    """Builds chains for one pipeline. A drafter that is gone is bridged over, as the engine does."""

    def __init__(self, pipeline: PipelineModel, codec: ActionCodec) -> None:
        self._pipeline = pipeline
        self._codec = codec
        self._widest = codec.spaces.windows[-1]
        self._curve = lru_cache(maxsize=4096)(self._make_curve)
        self._target_seat = Seat(codec.num_slots)
        self._warmups = [Warmup(kind=kind) for kind in codec.spaces.warmups]

    def chain(
        self, action: Action, conditions: Conditions, request: Request
    ) -> tuple[SimChain, list[Seat], DrafterModel | None]:
        """The chain, the seats of the stages that compute, and the n-gram drafter in front of them, if any."""
        spaces = self._codec.spaces
        adapter = self._adapter(action)
        stages: list[SimStage] = []
        seats: list[Seat] = []
        ngram: DrafterModel | None = None
        wanted, window_before = int(spaces.min_drafts[action[-4]]), 0
        for slot in slots_of(int(action[0])):
            drafter = self._pipeline.drafters[slot]
            if drafter.name in conditions.dead:
                continue
            window = int(spaces.windows[action[1 + slot]])
            if drafter.ngram:
                ngram = drafter
                stages.append(self._ngram_stage(drafter, window, conditions, request))
                continue
            seats.append(Seat(slot, adapter if adapter in drafter.adapters else ""))
            stages.append(
                SimStage(
                    self._curve(slot, conditions.slow_down[drafter.name], self._context(drafter, request)),
                    name=drafter.name,
                    window=window,
                    min_drafts=min(wanted, window_before),
                    prefill_s=self._prefill_s(drafter, conditions.slow_down[drafter.name], request),
                    overhead_s=drafter.overhead_ms / 1e3,
                    rollback_s=drafter.rollback_ms / 1e3,
                    switch_s=drafter.switch_ms / 1e3,
                )
            )
            window_before = window
        target, slow_down = self._pipeline.target, conditions.slow_down["target"]
        seats.append(self._target_seat)
        stages.append(
            SimStage(
                self._curve(self._target_seat.slot, slow_down, self._context(target, request)),
                name="target",
                min_drafts=min(wanted, window_before),
                prefill_s=self._prefill_s(target, slow_down, request),
                overhead_s=target.overhead_ms / 1e3,
            )
        )
        factor = self._pipeline.contention * conditions.contention
        count = len(stages)
        contention = None if factor == 1 or count == 1 else np.full((count, count), factor).tolist()
        mode = Mode.LOCKSTEP if action[0] == OFF else spaces.modes[action[-3]]
        warmup = self._warmups[action[-2]]
        return SimChain(tuple(stages), mode, warmup, contention, self._pipeline.wrong_equal), seats, ngram

    def picks(self, seats: list[Seat], request: Request, conditions: Conditions) -> Codes:
        """Picks of the seats over the request's text, int8 [seats, output_tokens], as `simulator.draw_picks` has it."""
        picks: Codes = np.zeros((len(seats), request.output_tokens), dtype=np.int8)
        for index in range(len(seats) - 2, -1, -1):
            wrong = request.uniform >= self._agreement(seats[index], request, conditions)
            after = picks[index + 1]
            same = (after > 0) & (request.coin < self._pipeline.wrong_equal)
            picks[index] = np.where(wrong, np.where(same, after, index + 1), 0)
        return picks

    def agreed(self, request: Request, conditions: Conditions, first: int, last: int) -> NDArray[np.float64]:
        """Positions `first` .. `last - 1` at which each drafter agrees without an adapter, float64 [drafters]."""
        part = request.uniform[first:last]
        seats = [Seat(slot) for slot in range(len(self._pipeline.drafters))]
        return np.array([float((part < self._agreement(seat, request, conditions)).sum()) for seat in seats])

    def plain_step_s(self, conditions: Conditions, request: Request) -> float:
        """Seconds that plain decoding takes for a token."""
        target, slow_down = self._pipeline.target, conditions.slow_down["target"]
        curve = self._curve(self._target_seat.slot, slow_down, self._context(target, request))
        return curve.points[1] + target.overhead_ms / 1e3

    def step_s(self, slot: int) -> float:
        """Seconds of a drafter's step of one token, undisturbed; the target's for the slot after the last."""
        model = self._model(slot)
        return self._curve(slot, 1.0, 0).points[1] + model.overhead_ms / 1e3

    def verify_ratio(self) -> float:
        """The target's forward of eight tokens relative to one."""
        curve = self._curve(self._target_seat.slot, 1.0, 0)
        return curve.seconds(8) / curve.points[1]

    def _model(self, slot: int) -> StageModel:
        return self._pipeline.target if slot == self._target_seat.slot else self._pipeline.drafters[slot]

    def _make_curve(self, slot: int, slow_down: float, context_tokens: int) -> LatencyCurve:
        model = self._model(slot)
        longer_ms = model.ms_per_1k_context * context_tokens / 1e3
        bare = LatencyCurve({num_tokens: ms / 1e3 for num_tokens, ms in model.ms.items()})
        known = sorted({1, *bare.points})
        return _TabulatedCurve({n: slow_down * (bare.seconds(n) + longer_ms / 1e3) for n in known})

    @staticmethod
    def _context(model: StageModel, request: Request) -> int:
        """The context that counts for the latency curve: none where it makes no difference, so curves can be shared."""
        return request.prompt_tokens if model.ms_per_1k_context else 0

    @staticmethod
    def _prefill_s(model: StageModel, slow_down: float, request: Request) -> float:
        first_ms = model.ms[min(model.ms)]
        return slow_down * (first_ms + model.prefill_ms_per_token * request.prompt_tokens) / 1e3

    def _adapter(self, action: Action) -> str:
        index, names = int(action[-1]), self._codec.menu.adapters
        return "" if index == NO_ADAPTER or index > len(names) else names[index - 1]

    def _agreement(self, seat: Seat, request: Request, conditions: Conditions) -> float:
        drafter = self._pipeline.drafters[seat.slot]
        return min(drafter.agreement_on(request.kind, seat.adapter) * conditions.agreement[drafter.name], 1.0)

    def _ngram_stage(self, drafter: DrafterModel, window: int, conditions: Conditions, request: Request) -> SimStage:
        """An n-gram drafter that always has something to offer, right with the same chance at every position."""
        agreement = self._agreement(Seat(self._pipeline.drafters.index(drafter)), request, conditions)
        drafts = _run_lengths(request.uniform < agreement, self._widest)
        count = len(drafts)
        return SimStage(
            LatencyCurve({1: 1e-6}),
            name=drafter.name,
            window=window,
            overhead_s=drafter.ms[min(drafter.ms)] * conditions.slow_down[drafter.name] / 1e3,
            drafts=LocalDrafts(
                np.full(count, self._widest, dtype=np.int64), drafts, np.full((count, self._widest), agreement)
            ),
        )


def _run_lengths(right: NDArray[np.bool_], most: int) -> NDArray[np.int64]:
    """How many in a row are right from each position on, at most `most`, int64 [n]."""
    count = len(right)
    wrong_at = np.where(right, count, np.arange(count))
    next_wrong = np.minimum.accumulate(wrong_at[::-1])[::-1]
    lengths: NDArray[np.int64] = np.minimum(next_wrong - np.arange(count), most).astype(np.int64)
    return lengths
