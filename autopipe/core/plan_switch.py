"""The way from one plan to the next: load what it needs while the old one runs, then change over, or give it up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from autopipe.core.chain import stage_keys
from autopipe.core.errors import AutoPipeError
from autopipe.core.fleet import Fleet
from autopipe.core.plan import Plan


class PlanSwitch:
    """At most one plan waits to come into force. Used by the engine's thread only.

    Args:
        retire: unloads all stages but those whose keys are given.
    """

    def __init__(self, fleet: Fleet, retire: Callable[[set[str]], None]) -> None:
        self.load_errors: dict[str, AutoPipeError] = {}
        self._fleet = fleet
        self._retire = retire
        self._current: Plan | None = None
        self._pending: tuple[Plan, Future[None]] | None = None

    @property
    def pending(self) -> Plan | None:
        return None if self._pending is None else self._pending[0]

    @property
    def waits_for_idle(self) -> bool:
        """Whether the pending plan has another target, or its layers elsewhere: for between requests only, since
        devices of different kinds need not round alike."""
        plan, current = self.pending, self._current
        if plan is None or current is None:
            return False
        return _target_key(plan) != _target_key(current) or plan.target.device_map != current.target.device_map

    def needs(self, key: str) -> bool:
        """Whether the pending plan has this stage."""
        return self._pending is not None and key in stage_keys(self._pending[0])

    def start(self, current: Plan, plan: Plan, done: Future[None]) -> None:
        """Make `plan` the pending one; a plan that was pending is given up. `done` learns how it ends."""
        self.give_up(AutoPipeError("another plan was applied before this one was ready"))
        self._current, self._pending = current, (plan, done)
        self.load_errors.clear()
        self._fleet.forgive(plan)
        self._retire({*stage_keys(current), *stage_keys(plan)})
        if not self.waits_for_idle:
            self._start_stages(plan)

    def give_up(self, error: Exception) -> None:
        """Stay with the plan in force."""
        if self._pending is not None and self._current is not None:
            done = self._pending[1]
            self._pending = None
            self._retire(set(stage_keys(self._current)))
            done.set_exception(error)

    def withdraw(self, done: Future[None]) -> None:
        """Give the pending plan up, if it is the one `done` belongs to."""
        if self._pending is not None and self._pending[1] is done:
            self.give_up(AutoPipeError("withdrawn"))

    def drop(self, error: Exception) -> None:
        """The engine is closing: nothing comes into force any more."""
        if self._pending is not None:
            self._pending[1].set_exception(error)
            self._pending = None

    def settle(self, idle: bool) -> tuple[Plan, Future[None]] | None:
        """The plan that can come into force now, if any; it no longer counts as pending.

        Args:
            idle: whether no request is under way.
        """
        if self._pending is None:
            return None
        plan, _ = self._pending
        keys = stage_keys(plan)
        failed = next((self.load_errors[key] for key in keys if key in self.load_errors), None)
        if failed is not None:
            self.give_up(failed)
            return None
        if self.waits_for_idle:
            if not idle:
                return None
            self._start_stages(plan)
        if self._pending is None or not all(self._fleet.ready(key) for key in keys):
            return None
        settled, self._pending = self._pending, None
        return settled

    def _start_stages(self, plan: Plan) -> None:
        try:
            self._fleet.start(plan)
        except (AutoPipeError, OSError) as error:
            self.give_up(error if isinstance(error, AutoPipeError) else AutoPipeError(f"no new process: {error}"))


def _target_key(plan: Plan) -> str:
    return stage_keys(plan)[-1]
