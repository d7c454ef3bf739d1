"""Chains of emulated stages for tests of the engine with real processes: a test costs little."""

from __future__ import annotations

from typing import Any

from autopipe.core.engine import Engine
from autopipe.core.plan import Plan
from autopipe.core.sampling import SamplingParams
from tests.core.pipeline import PROMPT


def stage(
    name: str,
    agreement: float = 1.0,
    *,
    ms: float = 0.3,
    faults: dict[str, int] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    emulated = {"ms": {1: ms}, "agreement": agreement, "vocab_size": 64, **(faults or {})}
    return {"model": "emulated", "name": name, "emulated": emulated, **settings}


def plan(*stages: dict[str, Any], mode: str = "async", **settings: Any) -> Plan:
    return Plan.parse({"chain": stages, "mode": mode, **settings})


THREE = (stage("small", 0.6, window=5), stage("middle", 0.8, window=9), stage("target"))


def collect(engine: Engine, num_tokens: int = 60, **options: Any) -> list[int]:
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=num_tokens, **options))
    return [token for block in handle for token in block.token_ids]
