"""How things stand, as the live page, the metrics and `GET /v1/autopipe/plan` show it (docs/serve.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopipe.service.events import Event
from autopipe.service.gauges import Gauges
from autopipe.service.host import EngineHost
from autopipe.service.plans import describe, plan_data


@dataclass(slots=True)
class Change:
    """The last change of plan.

    Attributes:
        source: who chose it: start, policy, pin, release, idle, request.
        predicted_gain, observed_gain: goodput relative to that before, minus 1; None: not known.
        before_tokens_per_s: goodput before it.
    """

    source: str
    reason: str
    predicted_gain: float | None = None
    observed_gain: float | None = None
    before_tokens_per_s: float | None = None


def full_status(
    host: EngineHost, gauges: Gauges, change: Change, events: list[Event], **plan_state: Any
) -> dict[str, Any]:
    """The state of a loaded pipeline.

    Args:
        plan_state: more about the plan: policy, pinned, asleep.
    """
    load, plan = host.load(), host.plan
    return {
        "load": {"running": load.running, "waiting": load.waiting},
        "tokens_per_s": gauges.beat.tokens_per_s,
        "plain_tokens_per_s": gauges.plain_tokens_per_s(load.running),
        "energy_j_per_token": gauges.energy_j_per_token,
        "sharing": host.sharing,
        "prefix_cache": dict(host.cache_stats()),
        "plan": {
            **plan_data(plan),
            "description": describe(plan),
            **plan_state,
            "source": change.source,
            "reason": change.reason,
            "predicted_gain": change.predicted_gain,
            "observed_gain": change.observed_gain,
        },
        "stages": gauges.stage_rows(),
        "fallbacks": host.fallbacks()[-10:],
        "events": [{"kind": event.kind, **event.data} for event in events],
    }


def empty_status() -> dict[str, Any]:
    """The same keys while there is no pipeline."""
    return {
        "load": {"running": 0, "waiting": 0},
        "tokens_per_s": 0.0,
        "plain_tokens_per_s": None,
        "energy_j_per_token": None,
        "sharing": None,
        "prefix_cache": {},
        "plan": {"description": "", "reason": "", "predicted_gain": None, "observed_gain": None, "pinned": False},
        "stages": [],
        "fallbacks": [],
        "events": [],
    }
