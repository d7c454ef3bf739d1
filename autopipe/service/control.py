"""The runtime controller: measures control intervals, has plans put in force, restarts what died, sleeps when idle."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import AutoPipeError
from autopipe.core.plan import Mode, Plan
from autopipe.core.telemetry import Sampler
from autopipe.core.telemetry.announce import Announcer
from autopipe.policies.events import EventKind, PolicyEvent
from autopipe.service.config import ServiceConfig
from autopipe.service.events import EventHub
from autopipe.service.gauges import Gauges
from autopipe.service.host import EngineHost
from autopipe.service.metrics import Metrics
from autopipe.service.plans import PinnedPlan, describe, pinned_plan
from autopipe.service.policy import start_policy
from autopipe.service.pulse import Pulse
from autopipe.service.status import Change, full_status
from autopipe.service.totals import StageTotals
from autopipe.service.watchdog import Watchdog

if TYPE_CHECKING:
    from autopipe.policies.controller import RuntimeController

_log = logging.getLogger("autopipe.service")

_TICK_S = 0.25
_RETRY_S = 2.0
"""Between two attempts to put a plan in force."""


class Control:
    """Decides, interval by interval, which plan is in force.

    A pinned plan beats the policy's; while the service sleeps, the target alone is loaded. Plans are put in force by
    one thread of their own, so that loading a drafter holds nothing up.
    """

    def __init__(
        self,
        config: ServiceConfig,
        host: EngineHost,
        pulse: Pulse,
        totals: StageTotals,
        events: EventHub,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._host = host
        self._pulse = pulse
        self._events = events
        self._metrics = metrics
        self._home = host.plan
        self._pinned: Plan | None = None
        self._asleep = False
        self._change = Change("start", "the plan the service was started with")
        self._sampler = Sampler()
        self._gauges = Gauges(host, pulse, totals, self._sampler)
        self._watchdog = Watchdog(host, events, metrics)
        self._retry_at_s = 0.0
        self._deciding = threading.Lock()
        """Held while a plan is decided on and its application begun: a request and the watch may do so at once."""
        self._stop = threading.Event()
        self._applier = ThreadPoolExecutor(1, thread_name_prefix="autopipe-apply")
        self._under_way: Future[None] | None = None
        self._thread = threading.Thread(target=self._run, name="autopipe-control", daemon=True)
        self._policy: RuntimeController | None = None
        self._announcer: Announcer | None = None
        metrics.show_plan(host.plan, config.policy, pinned=False, source="start")

    def start(self) -> None:
        """Begin to look, to let the policy choose, and to show the pipeline to `autopipe top`.

        Raises:
            ConfigError: the policy cannot be had.
        """
        self._sampler.start()
        self._policy = start_policy(self._config, self._host, self._sampler, self._note_policy)
        self._announcer = Announcer(self._host.engine, self._sampler)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._announcer is not None:
            self._announcer.close()
        if self._policy is not None:
            self._policy.stop()
        if self._thread.is_alive():
            self._thread.join(5)
        self._applier.shutdown(wait=False, cancel_futures=True)
        self._sampler.stop()

    # -- what others ask ------------------------------------------------------------------------------------

    @property
    def target_lives(self) -> bool:
        return self._host.plan.names()[-1] in self._host.worker_ids()

    @property
    def pinned(self) -> bool:
        return self._pinned is not None

    def pin(self, wanted: PinnedPlan | None) -> Future[None]:
        """Put a plan in force and keep it, or (None) keep the one in force; done when it is in force.

        The future raises AutoPipeError when the plan cannot be loaded; what was in force then stays.

        Raises:
            ConfigError: it names stages that the service does not have, or does not fit together.
        """
        if wanted is None:
            plan = self._pinned or (self._home if self._asleep else self._host.plan)
        else:
            plan = pinned_plan(wanted, self._home)
        return self._later(lambda: self._set_pin(plan, "pin", "pinned by a client"))

    def release(self) -> Future[None]:
        """Let the policy choose again; with a static policy, the plan the service was started with returns."""
        return self._later(lambda: self._set_pin(None, "release", "released by a client"))

    def _set_pin(self, plan: Plan | None, source: str, reason: str) -> None:
        before, self._pinned = self._pinned, plan
        self._rest(asleep=False)
        self._hold_policy()
        try:
            self._apply(source, reason)
        except BaseException:
            self._pinned = before
            self._hold_policy()
            raise
        self._show(None)

    def note_request(self) -> None:
        """A request has come: wake up."""
        self._pulse.touch()
        with self._deciding:
            if self._asleep:
                self._rest(asleep=False)
                self._later(self._bring_back)

    def _rest(self, *, asleep: bool) -> None:
        """Fall asleep or wake up; a policy that is awake finds all drafters loaded when it wants them."""
        self._asleep = asleep
        self._host.engine.keep_loaded([] if asleep or self._policy is None else [self._home])

    def _bring_back(self) -> None:
        """Load the drafters again, then let a policy go on."""
        try:
            plan = self._pinned or self._home
            self._apply("request", "the first request after a pause brings the drafters back", plan)
        finally:
            self._hold_policy()

    def _hold_policy(self) -> None:
        """Let the policy choose exactly while nobody else does."""
        if self._policy is not None:
            if self._pinned is not None or self._asleep:
                self._policy.pause()
            else:
                self._policy.resume()

    def _note_policy(self, event: PolicyEvent) -> None:
        """The policy has done something. Runs in its thread."""
        if event.kind is EventKind.PLAN:
            change = Change("policy", event.reason, event.predicted_gain, None, self._gauges.beat.tokens_per_s or None)
            self._change = change
            self._show("policy")
            _log.info(
                "plan: %s -> %s (%s: %s; predicted gain %s)",
                event.old_plan, event.new_plan, event.policy, event.reason, _percent(event.predicted_gain),
            )  # fmt: skip
        elif event.kind is EventKind.OUTCOME:
            self._change.observed_gain = event.observed_gain
            _log.info(
                "plan: %s gained %s (predicted %s)",
                event.new_plan, _percent(event.observed_gain), _percent(event.predicted_gain),
            )  # fmt: skip
        else:
            if event.kind is EventKind.CALIBRATED:
                self._change = Change("policy", event.reason)
            _log.info("policy: %s: %s", event.kind.value, event.reason)
        kind = "plan" if event.kind is EventKind.PLAN else "policy"
        data = event.to_dict()
        self._events.publish(
            kind, {**data, "source": "policy", "old": data.pop("old_plan"), "new": data.pop("new_plan")}
        )

    def status(self) -> dict[str, Any]:
        """How things stand."""
        return full_status(
            self._host,
            self._gauges,
            self._change,
            self._events.recent()[-10:],
            policy=self._config.policy,
            pinned=self.pinned,
            asleep=self._asleep,
        )

    # -- the loop -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_interval_s = time.monotonic() + self._config.control_interval_s
        while not self._stop.wait(_TICK_S if self._config.control_interval_s > _TICK_S else 0.1):
            try:
                self._watch()
                if time.monotonic() >= next_interval_s:
                    next_interval_s = time.monotonic() + self._config.control_interval_s
                    self._measure()
                    self._sleep_if_idle()
            except AutoPipeError as error:
                _log.warning("control: %s", error)
            except Exception:
                _log.exception("control failed; it goes on")

    def _measure(self) -> None:
        """Take the figures of the interval that has just ended, and tell listeners."""
        self._gauges.measure()
        self._show(None)  # a policy begins with plain decoding, without a word
        beat, change = self._gauges.beat, self._change
        if not beat.num_tokens:
            return
        if change.before_tokens_per_s and change.source != "policy":  # a policy measures what came of its own
            change.observed_gain = beat.tokens_per_s / change.before_tokens_per_s - 1
        self._events.publish("acceptance", {**self._gauges.to_event(), "observed_gain": change.observed_gain})

    def _sleep_if_idle(self) -> None:
        limit_s = self._config.idle_unload_s
        load, busy = self._host.load(), self._under_way is not None and not self._under_way.done()
        if limit_s is None or busy or self._asleep or load.running or load.waiting or not _has_models(self._host.plan):
            return
        if time.monotonic() - self._pulse.last_activity_s <= limit_s:
            return
        with self._deciding:
            self._rest(asleep=True)
            self._hold_policy()
            self._apply_later("idle", f"no request for {limit_s:g} s: drafters are unloaded")

    def _watch(self) -> None:
        """Have what died started again, and what somebody put in force over a pin taken back."""
        must_revive = self._watchdog.look()
        if self._asleep and self._host.load().running:  # it came while the drafters were being unloaded
            self.note_request()
        with self._deciding:
            if self._under_way is not None and not self._under_way.done():
                return
            if must_revive:
                self._later(self._revive)
            elif self._wanted_plan() not in (None, self._host.plan) and time.monotonic() > self._retry_at_s:
                self._retry_at_s = time.monotonic() + _RETRY_S
                self._apply_later("pin" if self.pinned else "idle" if self._asleep else "start", "put in force again")

    # -- plans ----------------------------------------------------------------------------------------------

    def _wanted_plan(self) -> Plan | None:
        """The plan that should be in force; None: the policy decides."""
        if self._asleep:
            plan = self._pinned or self._home
            return plan.model_copy(update={"chain": plan.chain[-1:], "mode": Mode.PLAIN})
        if self._pinned is None and self._policy is not None:
            return None
        return self._pinned or self._home

    def _later(self, work: Callable[[], None]) -> Future[None]:
        """Have the thread that applies plans do something."""

        def run() -> None:
            try:
                work()
            except AutoPipeError:
                raise  # has been told
            except Exception:
                _log.exception("a plan could not be put in force")
                raise

        self._under_way = self._applier.submit(run)
        return self._under_way

    def _revive(self) -> None:
        """Have the workers of the plan in force started again."""
        try:
            self._host.apply(self._host.plan)
        except AutoPipeError as error:
            _log.warning("not started again: %s", error)
            self._events.publish("worker", {"stage": self._host.plan.names()[-1], "what": f"not started: {error}"})
            raise

    def _apply_later(self, source: str, reason: str) -> None:
        """Have the plan that is wanted by then put in force."""
        self._later(lambda: self._apply(source, reason))

    def _apply(self, source: str, reason: str, plan: Plan | None = None) -> None:
        """Put in force `plan`, or what is wanted now; no plan: the policy decides."""
        old, new = self._host.plan, plan or self._wanted_plan()
        if new is None or new == old:
            return
        before = self._gauges.beat.tokens_per_s or None
        try:
            self._host.apply(new)
        except AutoPipeError as error:
            _log.warning("plan not put in force: %s", error)
            self._events.publish(
                "plan", {"source": source, "reason": reason, "failed": str(error), "old": describe(old)}
            )
            raise
        if source != "idle":
            self._pulse.touch()  # however long that took, nobody has been idle
        self._change = Change(source, reason, before_tokens_per_s=before)
        self._show(source)
        _log.info("plan: %s -> %s (%s: %s)", describe(old), describe(new), source, reason)
        self._events.publish(
            "plan",
            {
                "source": source,
                "reason": reason,
                "old": describe(old),
                "new": describe(new),
                "predicted_gain": None,
            },
        )

    def _show(self, source: str | None) -> None:
        self._metrics.show_plan(self._host.plan, self._config.policy, pinned=self.pinned, source=source)


def _percent(gain: float | None) -> str:
    return "unknown" if gain is None else f"{gain:+.1%}"


def _has_models(plan: Plan) -> bool:
    """Whether a drafter takes memory."""
    return any(not stage.is_ngram for stage in plan.drafters)
