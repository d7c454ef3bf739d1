"""Small scenarios and emulated plans for the tests of the environments."""

from __future__ import annotations

from typing import Any

from autopipe.core.plan import Plan
from autopipe.envs.scenario import Scenario

DRAFTERS: list[dict[str, Any]] = [
    {"name": "ngram", "ngram": True, "ms": {1: 0.01}, "agreement": {"code": 0.7, "other": 0.2}},
    {
        "name": "small",
        "ms": {1: 1.0},
        "memory_gb": 1,
        "power_w": 10,
        "agreement": {"code": 0.8, "other": 0.6},
        "adapters": {"chat": {"chat": 0.95, "other": 0.5}},
    },
    {"name": "medium", "ms": {1: 3.0}, "memory_gb": 3, "power_w": 20, "agreement": {"other": 0.9}},
]


def scenario(**changes: Any) -> Scenario:
    """A target of 10 ms, three drafters, 2000 tokens of chat; `changes` replace top-level keys."""
    data: dict[str, Any] = {
        "name": "test",
        "pipeline": {
            "target": {"ms": {1: 10.0, 8: 12.0, 16: 16.0}, "memory_gb": 4, "power_w": 30},
            "drafters": DRAFTERS,
            "device_memory_gb": 20,
            "idle_power_w": 5,
            "power_limit_w": 60,
        },
        "phases": [{"tokens": 2000, "kinds": {"chat": 1}, "output_tokens": {"low": 100, "high": 200}}],
    }
    return Scenario.parse({**data, **changes})


def pipeline(**changes: Any) -> dict[str, Any]:
    """The pipeline of `scenario`, with some keys changed."""
    return {**scenario().pipeline.model_dump(mode="json"), **changes}


def emulated_stage(name: str, agreement: float = 1.0, *, ms: float = 0.3, **settings: Any) -> dict[str, Any]:
    emulated = {"ms": {1: ms}, "agreement": agreement, "vocab_size": 64}
    return {"model": "emulated", "name": name, "emulated": {**emulated, **settings.pop("faults", {})}, **settings}


def emulated_plan(*stages: dict[str, Any]) -> Plan:
    """Two drafters and a target, all emulated, or the stages given."""
    chain = stages or (
        emulated_stage("small", 0.6, ms=0.1),
        emulated_stage("medium", 0.9, ms=0.4),
        emulated_stage("target", ms=1.5),
    )
    return Plan.parse({"chain": list(chain), "mode": "async"})
