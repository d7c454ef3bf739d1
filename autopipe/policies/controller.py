"""Applies a policy to a running engine, every control interval, off the path of the tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from autopipe.core.errors import AutoPipeError, ConfigError, EngineClosedError
from autopipe.core.live_engine import LiveEngine
from autopipe.core.telemetry import Sampler
from autopipe.envs.base import interval_info
from autopipe.envs.config import EnvConfig
from autopipe.envs.interval import Interval
from autopipe.envs.live_meter import LiveMeter
from autopipe.envs.menu import OFF, Action, ActionCodec, Mask, PlanMenu, slots_of
from autopipe.envs.observation import Observer
from autopipe.envs.scenario import PipelineModel
from autopipe.envs.stream import Block
from autopipe.policies.base import Policy, Reason, Situation, is_switch
from autopipe.policies.engine_watch import EngineWatch, KindOf
from autopipe.policies.events import EventKind, PolicyEvent
from autopipe.policies.live_profile import live_profile
from autopipe.policies.registry import make_policy
from autopipe.policies.safety import SafePolicy, SafetyConfig

_log = logging.getLogger(__name__)

EVENTS_KEPT = 1000
_MIN_NAP_S, _MAX_NAP_S, _IDLE_NAP_S = 0.005, 0.1, 0.1
_OUTCOME_INTERVALS = 2


class RuntimeController:
    """A policy at work on a live engine.

    It has a thread of its own, which looks at the engine's counters now and then. A slow policy makes intervals
    longer; it delays no token. Output does not depend on it: plans change speed only. The first interval runs plain
    decoding, to know what it takes.

    Args:
        policy: a policy or its name (`rules`, `bandit`, `planner`, `rl`, `off`, `static`, or a policy's folder).
        menu: plans on offer; None: the drafters of the engine's plan. All its drafters stay loaded.
        interval_tokens: output tokens of a control interval.
        telemetry: a running sampler, True for one of its own, False for none.
        prompt_kind: the kind of a prompt from its token ids; None: all are `other`.
        profile: what was measured beforehand; None: what the engine measured when it loaded the models.
        on_event: told of every event, in the controller's thread; what it raises is logged.
        safety: settings of the safety layer.

    Raises:
        ConfigError: an unknown policy, or a menu for another target.
    """

    def __init__(
        self,
        engine: LiveEngine,
        policy: Policy | str,
        *,
        menu: PlanMenu | None = None,
        interval_tokens: int = 32,
        telemetry: Sampler | bool = True,
        prompt_kind: KindOf | None = None,
        profile: PipelineModel | None = None,
        on_event: Callable[[PolicyEvent], None] | None = None,
        safety: SafetyConfig | None = None,
        seed: int = 0,
    ) -> None:
        self._config = EnvConfig(interval_tokens=interval_tokens)
        self._menu = PlanMenu.from_plan(engine.plan) if menu is None else menu
        if self._menu.target.identity() != engine.plan.target.identity():
            raise ConfigError("menu.target", self._menu.target.model, f"the engine's ({engine.plan.target.model})")
        self._codec = ActionCodec(self._config.spaces, self._menu)
        inner = make_policy(policy) if isinstance(policy, str) else policy
        self.policy = SafePolicy(inner, safety, fallback=lambda: make_policy("rules"))
        self.events: deque[PolicyEvent] = deque(maxlen=EVENTS_KEPT)
        self._engine, self._on_event, self._seed = engine, on_event, seed
        self._profile = profile
        self._watch = EngineWatch(engine, prompt_kind)
        self._meter = LiveMeter(engine, self._codec, telemetry, None)
        self._all = (1 << len(self._menu.drafters)) - 1
        self._action = self._codec.off()
        self._applied = engine.plan
        self._failed = 0
        self._blocks: list[Block] = []
        self._history: deque[Interval] = deque(maxlen=_OUTCOME_INTERVALS)
        self._awaiting: tuple[PolicyEvent, float | None] | None = None
        self._counts = {"intervals": 0, "switches": 0, "retunes": 0, "rejected": 0}
        self._decision_ms = 0.0
        self._observer: Observer | None = None
        self._noted = 0
        self._stop, self._paused = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # -- callers' side --------------------------------------------------------------------------------------

    def start(self) -> RuntimeController:
        """Begin; returns at once. Does nothing when it runs already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="autopipe-policy", daemon=True)
            self._thread.start()
        return self

    def pause(self) -> None:
        """Leave the plan as it is until `resume`, for instance while somebody else applies one."""
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def stop(self) -> None:
        """End the thread; the plan in force stays. May be called twice."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10)
        self._meter.close()

    def __enter__(self) -> RuntimeController:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def status(self) -> dict[str, Any]:
        """How things stand, JSON-ready."""
        recent = _joined(self._history)
        last = self.events[-1].to_dict() if self.events else None
        return {
            "policy": self.policy.policy.name,
            "active": self._thread is not None and self._thread.is_alive(),
            "paused": self._paused.is_set(),
            **self._counts,
            "plan": self._codec.describe(self._action),
            "relative_goodput": recent.relative_goodput,
            "ms_per_token": recent.ms_per_token,
            "plain_ms_per_token": None if not recent.decode_tokens else 1e3 * recent.plain_s / recent.decode_tokens,
            "decision_ms": self._decision_ms,
            "guard": self.policy.stats.to_dict(),
            "last_event": last,
        }

    # -- the controller's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._begin()
            while not self._stop.wait(self._nap_s()) and not self._engine.closed:
                self._turn()
        except EngineClosedError:
            _log.debug("the engine was closed; the controller ends")
        except Exception:
            _log.exception("the controller failed; the plan in force stays")
        finally:
            self.policy.close()
            self._say(EventKind.STOPPED, "the controller has ended")

    def _begin(self) -> None:
        """Plain decoding, with every drafter loaded, until it has been measured."""
        self._load_all()
        slots = self._codec.num_slots
        known_s = self._meter.known_step_s(slots)
        self._observer = Observer(self._config, self._codec, known_s, self._meter.verify_ratio())
        profile = self._profile or live_profile(self._engine, self._menu, self._codec.slot_names())
        self.policy.reset(Situation(self._config, self._codec, profile), self._seed)
        self._meter.begin()

    def _load_all(self) -> None:
        """Load every drafter of the menu, or, where that fails, go on with those that run already."""
        full = self._codec.off()
        full[0] = self._all
        self._engine.keep_loaded([self._codec.plan(full)] if self._all else [])
        try:
            self._apply(self._codec.off())
        except EngineClosedError:
            raise
        except AutoPipeError as error:
            self._failed = self._dead()
            self._say(EventKind.REJECTED, f"some drafters cannot be loaded and are left out: {error}")
            self._apply(self._codec.off())

    def _nap_s(self) -> float:
        """Until about half of what the interval lacks will have come."""
        if self._engine.running is None:
            return _IDLE_NAP_S
        missing = self._config.interval_tokens - sum(block.num_tokens for block in self._blocks)
        pace_s = (_joined(self._history).ms_per_token or 10.0) / 1e3
        return min(max(0.5 * missing * pace_s, _MIN_NAP_S), _MAX_NAP_S)

    def _turn(self) -> None:
        self._blocks += self._watch.poll()
        if self._paused.is_set():
            self._blocks.clear()
            return
        if self._engine.plan is not self._applied:  # somebody else's; ours comes back with the next decision
            self._apply(self._action)
            self._blocks.clear()
            return
        if sum(block.num_tokens for block in self._blocks) < self._config.interval_tokens:
            return
        interval = self._measure()
        if interval.decode_tokens:
            self._decide(interval)

    def _measure(self) -> Interval:
        blocks, self._blocks = self._blocks, []
        plain, calibrated = bool(self._action[0] == OFF), self._meter.calibrated
        interval = self._meter.measure(blocks, self._action, plain=plain)
        interval.queue = self._engine.num_waiting
        self._history.append(interval)
        self._counts["intervals"] += 1
        if self._meter.calibrated and not calibrated:
            self._say(EventKind.CALIBRATED, f"plain decoding takes {interval.ms_per_token or 0:.2f} ms a token")
        return interval

    def _decide(self, interval: Interval) -> None:
        if self._observer is None:
            return
        self._observer.update(interval)
        self._report_outcome()
        info = {**interval_info(interval), "action_mask": self._mask(), "action_in_force": self._action.copy()}
        observation = self._observer.observe(interval, self._action)
        started_s = time.perf_counter()
        action = self.policy.act(observation, info)
        self._decision_ms = 1e3 * (time.perf_counter() - started_s)
        self._report_safety()
        if not np.array_equal(action, self._action):
            self._change(action, self.policy.explain())

    def _change(self, action: Action, reason: Reason) -> None:
        old, new = self._codec.describe(self._action), self._codec.describe(action)
        before = _joined(self._history)
        self._counts["switches" if is_switch(self._action, action) else "retunes"] += 1
        number = self._counts["switches"] + self._counts["retunes"]
        try:
            self._apply(action)
        except EngineClosedError:
            raise
        except AutoPipeError as error:
            self._failed |= int(action[0])
            self._counts["rejected"] += 1
            self._say(EventKind.REJECTED, str(error), old, new, number)
            return
        self._history.clear()
        event = self._say(EventKind.PLAN, reason.text, old, new, number, reason.predicted_gain)
        self._awaiting = (event, before.ms_per_token)

    def _apply(self, action: Action) -> None:
        plan = self._codec.plan(action, self._all & ~self._failed)
        self._engine.apply(plan)
        self._action, self._applied = action, self._engine.plan
        self._watch.poll()  # what came under the old plan, or while drafters were loading, is not of this interval
        self._blocks.clear()

    def _mask(self) -> Mask:
        total_bytes = self._menu.device_memory_bytes or self._meter.memory_total_bytes()
        return self._codec.masks(total_bytes, 0, self._config.memory_share, self._dead())

    def _dead(self) -> int:
        """Drafters whose process is gone, and those that could not be loaded."""
        alive, names = set(self._engine.worker_ids), self._codec.slot_names()
        gone = self._failed
        for slot in slots_of(self._all):
            if not self._menu.drafters[slot].stage.is_ngram and names[slot] not in alive:
                gone |= 1 << slot
        return gone

    # -- events ---------------------------------------------------------------------------------------------

    def _report_outcome(self) -> None:
        if self._awaiting is None or len(self._history) < _OUTCOME_INTERVALS:
            return
        (event, before_ms), self._awaiting = self._awaiting, None
        now_ms = _joined(self._history).ms_per_token
        gain = before_ms / now_ms - 1 if before_ms and now_ms else None
        self._say(
            EventKind.OUTCOME, event.reason, event.old_plan, event.new_plan, event.number, event.predicted_gain, gain
        )

    def _report_safety(self) -> None:
        stats = self.policy.stats
        new = min(stats.num_notes - self._noted, len(stats.notes))
        for note in stats.notes[len(stats.notes) - new :]:
            failed = stats.replaced_by is not None and note.endswith("takes over")
            self._say(EventKind.POLICY_FAILED if failed else EventKind.FLOOR, note)
        self._noted = stats.num_notes

    def _say(
        self,
        kind: EventKind,
        reason: str,
        old: str | None = None,
        new: str | None = None,
        number: int = 0,
        predicted: float | None = None,
        observed: float | None = None,
    ) -> PolicyEvent:
        words = self._codec.describe(self._action)
        event = PolicyEvent(
            kind, self.policy.policy.name, reason, old or words, new or words, number, predicted, observed
        )
        self.events.append(event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                _log.exception("on_event failed")
        return event


def _joined(history: deque[Interval]) -> Interval:
    """Times of several intervals as one."""
    intervals = list(history)
    return Interval(
        decode_tokens=sum(each.decode_tokens for each in intervals),
        decode_s=sum(each.decode_s for each in intervals),
        plain_s=sum(each.plain_s for each in intervals),
    )
