"""Controllers that choose plans: rules, a bandit, a planner, reinforcement learning; and what runs them.

Names load on first use: importing this costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.policies.base import Policy, Reason, Situation
    from autopipe.policies.controller import RuntimeController
    from autopipe.policies.events import EventKind, PolicyEvent
    from autopipe.policies.registry import POLICY_NAMES, make_policy
    from autopipe.policies.safety import SafePolicy, SafetyConfig

_HOME = {
    "EventKind": "events",
    "POLICY_NAMES": "registry",
    "Policy": "base",
    "PolicyEvent": "events",
    "Reason": "base",
    "RuntimeController": "controller",
    "SafePolicy": "safety",
    "SafetyConfig": "safety",
    "Situation": "base",
    "make_policy": "registry",
}

__all__ = [
    "POLICY_NAMES",
    "EventKind",
    "Policy",
    "PolicyEvent",
    "Reason",
    "RuntimeController",
    "SafePolicy",
    "SafetyConfig",
    "Situation",
    "make_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
