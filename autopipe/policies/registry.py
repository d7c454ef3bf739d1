"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from autopipe.core.errors import ConfigError
from autopipe.policies.base import Policy

_HOME = {
    "off": ("static", "OffPolicy"),
    "static": ("static", "StaticPolicy"),
    "rules": ("rules", "RulesPolicy"),
    "bandit": ("bandit", "BanditPolicy"),
    "planner": ("planner", "PlannerPolicy"),
    "rl": ("rl_policy", "RlPolicy"),
}
POLICY_NAMES = tuple(_HOME)
"""Policies that run in simulation and in the engine. `oracle` needs the simulator's full information."""


def make_policy(name: str | Path, key: str = "--policy", **options: Any) -> Policy:
    """A policy by name, or the one exported to a folder (`autopipe policy export`).

    Args:
        key: what an error calls the value.
        options: arguments of the policy's class.

    Raises:
        ConfigError: neither a name nor a folder with a policy.
    """
    if str(name) in _HOME:
        module, attribute = _HOME[str(name)]
        make: Callable[..., Policy] = getattr(import_module(f"autopipe.policies.{module}"), attribute)
        return make(**options)
    if Path(name).is_dir():
        from autopipe.policies.rl_policy import RlPolicy

        return RlPolicy(Path(name), **options)
    raise ConfigError(key, str(name), f"{', '.join(POLICY_NAMES)}, or a folder with an exported policy")
