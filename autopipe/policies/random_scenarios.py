"""Scenarios drawn at random, so that a policy trained on them has not seen one machine but thousands."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.scenario import Scenario

_KINDS = [kind.value for kind in PromptKind]
_NGRAM_AGREEMENT = {"code": (0.3, 0.7), "chat": (0.05, 0.3), "summary": (0.6, 0.95), "math": (0.2, 0.5)}
Draw = np.random.Generator


def random_scenario(rng: Draw) -> Scenario:
    """A machine, its models, the work and what goes wrong: all a function of the generator's state."""
    target_ms = float(10 ** rng.uniform(0.8, 2.2))
    shared = bool(rng.random() < 0.5)  # stages share cores and hinder each other, or have devices of their own
    drafters = _drafters(rng, target_ms)
    phases = [_phase(rng) for _ in range(int(rng.integers(1, 5)))]
    total = sum(phase["tokens"] for phase in phases)
    return Scenario.parse(
        {
            "name": "random",
            "pipeline": {
                "target": {
                    "ms": _curve(rng, target_ms),
                    "prefill_ms_per_token": 0.05 * target_ms * float(rng.uniform(0.2, 2)),
                    "ms_per_1k_context": 0.05 * target_ms * float(rng.random()),
                    "overhead_ms": 0.02 * target_ms * float(rng.random()),
                    "memory_gb": 10,
                    "power_w": 100,
                },
                "drafters": drafters,
                "contention": float(rng.uniform(1.3, 2.0) if shared else rng.uniform(1.0, 1.1)),
                "persistence": float(rng.uniform(0, 0.4)),
                "device_memory_gb": 25,
                "idle_power_w": 50,
                "power_limit_w": 300,
            },
            "phases": phases,
            "events": [_event(rng, [each["name"] for each in drafters], total) for _ in range(int(rng.integers(0, 4)))],
        }
    )


def _curve(rng: Draw, single_ms: float) -> dict[int, float]:
    """Milliseconds by rows: nearly flat up to 8, steeper beyond."""
    eight = 1 + float(rng.uniform(0.05, 0.9))
    thirty_two = eight * (1 + float(rng.uniform(0.2, 2.0)))
    return {1: single_ms, 8: single_ms * eight, 32: single_ms * thirty_two}


def _drafters(rng: Draw, target_ms: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if rng.random() < 0.8:
        agreement = {kind: float(rng.uniform(*limits)) for kind, limits in _NGRAM_AGREEMENT.items()}
        found.append(
            {
                "name": "ngram",
                "ngram": True,
                "ms": {1: 1e-3 * target_ms},
                "agreement": {**agreement, "other": float(rng.uniform(0.1, 0.4))},
            }
        )
    sizes = [("small", (0.05, 0.18), (0.3, 0.78)), ("medium", (0.18, 0.4), (0.6, 0.92))]
    if found:
        sizes = [size for size in sizes if rng.random() < 0.75]
    loads = rng.random() < 0.4
    for name, share, level in sizes:
        base = float(rng.uniform(*level))
        entry: dict[str, Any] = {
            "name": name,
            "ms": _curve(rng, target_ms * float(rng.uniform(*share))),
            "prefill_ms_per_token": 0.01 * target_ms * float(rng.uniform(0.1, 1)),
            "overhead_ms": 0.005 * target_ms,
            "memory_gb": 2 if name == "small" else 6,
            "power_w": 40,
            "load_ms": target_ms * float(rng.uniform(20, 150)) if loads else 0.0,
            "switch_ms": target_ms * float(rng.uniform(0.1, 1)),
            "agreement": {kind: _share(base + float(rng.normal(0, 0.1))) for kind in _KINDS},
        }
        if name == "small" and rng.random() < 0.5:
            special = str(rng.choice(_KINDS))
            entry["adapters"] = {
                "special": {
                    kind: _share(value + (0.2 if kind == special else -0.1))
                    for kind, value in entry["agreement"].items()
                }
            }
        found.append(entry)
    return found


def _share(value: float) -> float:
    return min(max(value, 0.05), 0.97)


def _phase(rng: Draw) -> dict[str, Any]:
    chosen = rng.choice(_KINDS, size=int(rng.integers(1, 3)), replace=False)
    low = int(rng.integers(64, 256))
    return {
        "tokens": int(rng.integers(1024, 5000)),
        "kinds": {str(kind): float(rng.uniform(0.2, 1)) for kind in chosen},
        "prompt_tokens": {"low": 32, "high": int(rng.integers(64, 1024))},
        "output_tokens": {"low": low, "high": low + int(rng.integers(32, 512))},
    }


def _event(rng: Draw, drafters: list[str], total: int) -> dict[str, Any]:
    start = int(rng.integers(0, total))
    end = start + int(rng.integers(512, 4096))
    stage = str(rng.choice([*drafters, "target"]))
    drafter = str(rng.choice(drafters))
    kinds: list[dict[str, Any]] = [
        {"type": "slow_down", "stage": stage, "factor": float(rng.uniform(0.6, 5))},
        {"type": "throttle", "factor": float(rng.uniform(1.2, 2.5))},
        {"type": "drift", "stage": drafter, "factor": float(rng.uniform(0.3, 1.6))},
        {"type": "drafter_dies", "stage": drafter},
        {"type": "memory_taken", "memory_gb": float(rng.uniform(2, 8))},
    ]
    return {**kinds[int(rng.integers(len(kinds)))], "start": start, "end": end}
