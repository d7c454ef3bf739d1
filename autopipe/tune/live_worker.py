"""The process that runs plans for real: `python -m autopipe.tune.live_worker`, started by `LiveProcess`.

It holds one engine. When it ends, all memory of what it measured is back with the system.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.api import AutoPipe

COMMANDS = ("put", "run", "trace", "rest", "close")


class LiveSession:
    """An engine that obeys commands. Each method is one; its result is JSON-ready."""

    def __init__(self) -> None:
        self._pipe: AutoPipe | None = None

    def put(self, plan: dict[str, Any]) -> None:
        """Put a plan in force; the first one, or one with other models, loads them."""
        from autopipe.api import AutoPipe
        from autopipe.core.plan import Plan

        parsed = Plan.parse(plan)
        if self._pipe is None:
            self._pipe = AutoPipe.from_plan(parsed)
        else:
            self._pipe.apply(parsed)

    def run(self, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Continue token ids, greedily. `seconds` as `autopipe bench` counts them: one call, prefill included."""
        pipe = self._opened()
        started = time.perf_counter()
        result = pipe.generate(input_ids=ids, max_new_tokens=max_new_tokens)
        seconds = time.perf_counter() - started
        stats = result.stats
        return {
            "token_ids": list(result.token_ids),
            "seconds": seconds,
            "ttft_s": stats.ttft_s,
            "acceptance_length": stats.acceptance_length,
            "energy_j": None if stats.energy is None else stats.energy.total_j,
            "fallbacks": list(stats.fallbacks),
            "memory_bytes": _memory_of_stages(),
        }

    def trace(self, ids: list[int], max_new_tokens: int, path: str) -> None:
        """Continue token ids, and write a Chrome trace."""
        self._opened().generate(input_ids=ids, max_new_tokens=max_new_tokens, trace=path)

    def rest(self, seconds: float) -> float | None:
        """Joules of the machine while nothing runs for `seconds`; None without an energy counter."""
        from autopipe.core.telemetry import Sampler

        with Sampler() as sampler:
            sampler.wait(2.0, sweeps=2)
            meter = sampler.measure_energy()
            time.sleep(seconds)
            return meter.stop(0).total_j

    def close(self) -> None:
        """End the engine and its processes."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _opened(self) -> AutoPipe:
        if self._pipe is None:
            raise ValueError("no plan has been put in force")
        return self._pipe


def _memory_of_stages() -> int:
    """Resident bytes of this process's children, the engine's stages; pages they share by share, where it is told."""
    import psutil

    total = 0
    for stage in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            full = stage.memory_full_info()
            total += getattr(full, "pss", full.rss)
    return total


def main() -> None:
    from autopipe.profile.worker import serve

    session = LiveSession()
    try:
        serve(session, COMMANDS)
    finally:
        session.close()
    os._exit(0)


if __name__ == "__main__":
    main()
