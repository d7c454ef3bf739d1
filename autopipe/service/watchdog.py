"""Notices workers that die, and says when they must be started again."""

from __future__ import annotations

import logging
import time

from autopipe.service.events import EventHub
from autopipe.service.host import EngineHost
from autopipe.service.metrics import Metrics

_log = logging.getLogger("autopipe.service")

_RETRY_S = 2.0
"""Between two attempts to start a worker again."""


class Watchdog:
    """Compares the workers that live with those that the plan needs. One thread uses it."""

    def __init__(self, host: EngineHost, events: EventHub, metrics: Metrics) -> None:
        self._host = host
        self._events = events
        self._metrics = metrics
        self._alive = dict(host.worker_ids())
        self._retry_at_s = 0.0

    def look(self) -> bool:
        """Tell of what has died or come; whether somebody should have the plan put in force again."""
        alive, plan = dict(self._host.worker_ids()), self._host.plan
        needed = {name for name, stage in zip(plan.names(), plan.chain, strict=True) if not stage.is_ngram}
        for name, process in self._alive.items():
            if name in needed and alive.get(name) != process:
                _log.warning("stage %r died; it is being started again", name)
                self._events.publish("worker", {"stage": name, "what": "died"})
                self._metrics.count_restart(name)
        for name, process in alive.items():
            if self._alive.get(name) != process:
                self._events.publish("worker", {"stage": name, "what": "started"})
        self._alive = alive
        if not needed - alive.keys() or time.monotonic() < self._retry_at_s:
            return False
        self._retry_at_s = time.monotonic() + _RETRY_S
        return True
