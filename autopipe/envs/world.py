"""The simulated machine of an episode: takes a plan, lives through a control interval, says what happened."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.chains import ChainFactory
from autopipe.envs.config import EnvConfig
from autopipe.envs.events import Conditions, conditions_at, next_change
from autopipe.envs.interval import DeviceFigures, Interval
from autopipe.envs.ledger import Ledger, Seating
from autopipe.envs.menu import OFF, Action, ActionCodec, slots_of
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.scenario import GIGABYTE, Scenario
from autopipe.envs.simulator import SimRequest, SimRun
from autopipe.envs.workload import Arrivals, draw_requests

_PENDING_CHUNK = 4
"""Tokens between two looks whether a plan that is loading has become ready."""
_AMBIENT_C, _LOAD_C, _WARMING = 35.0, 45.0, 0.1
"""A device's temperature idle, what full load adds, and how much of the way it goes in an interval."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A plan whose drafters are still loading."""

    action: Action
    ready_s: float


class SimWorld:
    """One episode's simulated machine.

    Args:
        seed: of the work; everything else is a function of the plans chosen.
        max_events: forwards kept per request for `events`; 0: none are kept.

    Attributes:
        now_s, token: the clock, and output tokens so far.
        action: the canonical action in force.
        resident: the last chain that was not `off`; its drafters stay loaded.
        events: forwards that ended in the last interval, [slot, start_s, end_s, rows, drafts, emitted], by end.
    """

    def __init__(
        self, scenario: Scenario, config: EnvConfig, codec: ActionCodec, seed: int, max_events: int = 0
    ) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self.token = 0
        self.action = codec.off()
        self.resident = OFF
        self.events: list[NDArray[np.float64]] = []
        self.factory = ChainFactory(scenario.pipeline, codec)
        self._config = config
        self._codec = codec
        self._max_events = max_events
        self._names = [*(drafter.name for drafter in scenario.pipeline.drafters), "target"]
        self._requests = draw_requests(scenario, seed)
        self._request = self._requests[0]
        self._arrivals = Arrivals(self._requests)
        self._num_begun = 0
        self._run: SimRun | None = None
        self._seating = Seating([])
        self._first_conditions = self.conditions = self._conditions_now()
        self._next_change = next_change(0, scenario.events)
        self._pending: _Pending | None = None
        self._stale = False
        self._temperature_c = _AMBIENT_C
        self._num_events_seen = 0
        pipeline = scenario.pipeline
        self._watts = np.zeros(codec.num_slots + 1)  # by slot, the target's last
        self._watts[: len(pipeline.drafters)] = [drafter.power_w for drafter in pipeline.drafters]
        self._watts[-1] = pipeline.target.power_w
        self._power_known = bool(self._watts.any()) or pipeline.idle_power_w > 0
        self._levels = np.array(codec.spaces.windows, dtype=np.int64)

    # -- what may be asked ----------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self.token >= self.scenario.total_tokens

    @property
    def dead(self) -> int:
        """Bit mask of drafters that are gone."""
        return sum(1 << slot for slot, name in enumerate(self._names[:-1]) if name in self.conditions.dead)

    @property
    def upcoming_kind(self) -> PromptKind:
        """Kind of the request under way, or of the next one where that is done: full information, for oracles."""
        over = self._run is None or self._run.done
        return self._requests[min(self._num_begun, len(self._requests) - 1)].kind if over else self._request.kind

    @property
    def memory_taken_bytes(self) -> int:
        """Memory that somebody else takes on the device."""
        return int(self.conditions.memory_taken_gb * GIGABYTE)

    def copy(self) -> SimWorld:
        """An independent copy, to ask what another plan would have done. Its events are not kept."""
        twin = copy.copy(self)
        twin._run, twin._seating, twin._arrivals = copy.deepcopy(
            (self._run, self._seating, _without_requests(self._arrivals))
        )
        twin._arrivals.requests = self._requests
        twin.events, twin._max_events = [], 0
        return twin

    # -- a control interval ---------------------------------------------------------------------------------

    def apply(self, action: Action) -> None:
        """Decide for a canonical action; it is in force at once, or when its drafters are loaded."""
        drafters, chain = self.scenario.pipeline.drafters, int(action[0])
        new = set(slots_of(chain)) - set(slots_of(self.resident))
        if action[-1] != self.action[-1]:
            new |= {slot for slot in slots_of(chain) if drafters[slot].adapters}
        load_s = max((drafters[slot].load_ms / 1e3 for slot in new), default=0.0)
        self._pending = None
        if load_s > 0:
            self._pending = _Pending(action, self.now_s + load_s)
        else:
            self._adopt(action)

    def outlook(self) -> Interval:
        """How things stand before anything has happened."""
        first = self._requests[0]
        interval = Interval(max_new_tokens=first.output_tokens, context_tokens=first.prompt_tokens, kind=first.kind)
        interval.slots = Ledger(self._codec.num_slots).close()
        self._measure_device(interval, Ledger(self._codec.num_slots))
        interval.energy_j = interval.plain_energy_j = None
        return interval

    def run_interval(self) -> Interval:
        """Go on until `interval_tokens` more tokens are out or the work is done."""
        interval, ledger = Interval(), Ledger(self._codec.num_slots)
        self.events = []
        agreed = np.zeros(len(self._names) - 1)
        while interval.num_tokens < self._config.interval_tokens and not self.done:
            run = self._run or self._begin_request(interval)
            before, started_s = run.tokens, run.now_s
            self._settle(run, ledger)
            self._advance(run, self._config.interval_tokens - interval.num_tokens)
            ledger.book(run, self._seating, self._windows())
            emitted = run.tokens - before
            interval.decode_tokens += emitted
            interval.decode_s += run.now_s - started_s
            interval.plain_s += emitted * self.factory.plain_step_s(self.conditions, self._request)
            agreed += self.factory.agreed(self._request, self._first_conditions, before, run.tokens)
            interval.num_tokens += emitted
            self.token += emitted
            self.now_s = run.now_s
            self._take_position(interval, run)
            if run.done:
                self._run = None
        if interval.decode_tokens:
            shares = agreed / interval.decode_tokens
            interval.agreement = {name: float(shares[slot]) for slot, name in enumerate(self._names[:-1])}
        interval.slots = ledger.close()
        interval.queue, interval.done = self._arrivals.waiting(self.now_s), self.done
        self._measure_device(interval, ledger)
        return interval

    # -- steps of it ----------------------------------------------------------------------------------------

    def _conditions_now(self) -> Conditions:
        return conditions_at(self.token, self.scenario.events, self._names)

    def _windows(self) -> NDArray[np.int64]:
        windows: NDArray[np.int64] = self._levels[self.action[1 : 1 + self._codec.num_slots]]
        return windows

    def _adopt(self, action: Action) -> None:
        self._stale = self._stale or not np.array_equal(action, self.action)
        self.action, self._pending = action, None
        if action[0] != OFF:
            self.resident = int(action[0])

    def _look_around(self) -> None:
        """Let what is due come about: a plan that has finished loading, an event."""
        if self._pending is not None and self.now_s >= self._pending.ready_s:
            self._adopt(self._pending.action)
        if self._next_change is not None and self.token >= self._next_change:
            self.conditions = self._conditions_now()
            self._next_change = next_change(self.token, self.scenario.events)
            self._stale = True

    def _begin_request(self, interval: Interval) -> SimRun:
        """Start the next request and run it to its first token, which no plan can hasten."""
        self._look_around()
        self._request = request = self._requests[self._num_begun]
        self._num_begun += 1
        arrival_s = self._arrivals.next(self.now_s)
        self._first_conditions = self.conditions
        chain, seats, ngram = self.factory.chain(self.action, self.conditions, request)
        self._run = run = SimRun(
            chain,
            SimRequest(request.output_tokens, request.prompt_tokens),
            self.factory.picks(seats, request, self.conditions),
            start_s=max(arrival_s, self.now_s),
            max_events=self._max_events,
        )
        self._seating = Seating(seats, ngram_slot=None if ngram is None else 0, cold=set(range(len(seats) - 1)))
        self._stale, self._num_events_seen = False, 0
        run.advance(1)
        self._seating.start_from(run)
        interval.ttfts_s.append(float(run.emitted_s[0]) - arrival_s)
        interval.num_tokens += run.tokens
        self.token += run.tokens
        self.now_s = run.now_s
        return run

    def _settle(self, run: SimRun, ledger: Ledger) -> None:
        """Bring the run in line with the plan and the conditions."""
        self._look_around()
        if not self._stale:
            return
        self._stale = False
        chain, seats, ngram = self.factory.chain(self.action, self.conditions, self._request)
        old = self._seating.seats
        if seats == old:
            run.retune(chain)
        elif run.done:
            return
        else:
            ledger.book(run, self._seating, self._windows())
            kept = [old.index(seat) if seat in old else None for seat in seats]
            run.switch(chain, self.factory.picks(seats, self._request, self._first_conditions), kept)
            self._take_events(run)
            self._seating = Seating(seats, cold={index for index, place in enumerate(kept) if place is None})
            self._seating.start_from(run)
        self._seating.ngram_slot = None if ngram is None else 0

    def _advance(self, run: SimRun, wanted: int) -> None:
        """Go on by `wanted` tokens, less where an event or a pending plan is due before."""
        if self._next_change is not None:
            wanted = min(wanted, max(1, self._next_change - self.token))
        if self._pending is not None:
            wanted = min(wanted, _PENDING_CHUNK)
        if wanted > 0 and not run.done:
            run.advance(wanted)
            self._take_events(run)

    def _take_position(self, interval: Interval, run: SimRun) -> None:
        interval.position, interval.max_new_tokens = run.tokens, self._request.output_tokens
        interval.context_tokens = self._request.prompt_tokens + run.tokens
        interval.kind = self._request.kind

    def _take_events(self, run: SimRun) -> None:
        """Keep new forwards of the timeline, with slots instead of places in the chain."""
        if self._max_events:
            new = run.events()[self._num_events_seen :].copy()
            self._num_events_seen += len(new)
            slots = np.array([seat.slot for seat in self._seating.seats])
            new[:, 0] = slots[new[:, 0].astype(np.int64)]
            self.events.append(new)

    def _measure_device(self, interval: Interval, ledger: Ledger) -> None:
        """Energy and telemetry of the interval, from how busy the stages were."""
        pipeline, seconds = self.scenario.pipeline, interval.decode_s
        utilisation = min(float(ledger.busy_s.sum()) / seconds, 1.0) if seconds > 0 else 0.0
        device = DeviceFigures(utilisation=utilisation, throttled=float(self.conditions.throttled))
        self._temperature_c += _WARMING * (_AMBIENT_C + _LOAD_C * utilisation - self._temperature_c)
        device.temperature_c = self.conditions.temperature_c or self._temperature_c
        if pipeline.device_memory_gb is not None:
            loaded = sum(pipeline.drafters[slot].memory_gb for slot in slots_of(self.resident))
            used_gb = pipeline.target.memory_gb + loaded + self.conditions.memory_taken_gb
            device.memory = min(used_gb / pipeline.device_memory_gb, 1.0)
        if self._power_known:
            interval.energy_j = pipeline.idle_power_w * seconds + float(ledger.busy_s @ self._watts)
            interval.plain_energy_j = (pipeline.idle_power_w + pipeline.target.power_w) * interval.plain_s
            if pipeline.power_limit_w is not None and seconds > 0:
                device.power = min(interval.energy_j / seconds / pipeline.power_limit_w, 1.0)
        interval.device = device


def _without_requests(arrivals: Arrivals) -> Arrivals:
    """A shallow copy that a deep copy does not follow into the (immutable) requests."""
    bare = copy.copy(arrivals)
    bare.requests = []
    return bare
