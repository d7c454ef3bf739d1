"""What the machine draws while it does nothing and while it computes; needed to predict energy."""

from __future__ import annotations

from autopipe.core.chain import default_threads
from autopipe.core.plan import Plan
from autopipe.profile import ProfilePrompt
from autopipe.tune.live import LiveBench, OutOfTimeError
from autopipe.tune.predict import PowerModel

_IDLE_S = 1.5
_TOKENS = 128


def measure_power(plain: Plan, prompt: ProfilePrompt, deadline_s: float) -> PowerModel | None:
    """Idle power, and what a computing core adds, from a pause and a request; None where there is no energy counter.

    Raises:
        AutoPipeError: plain decoding fails.
    """
    try:
        with LiveBench(_TOKENS, deadline_s) as bench:
            busy = bench.run(plain, prompt)
            if busy.energy_j is None:
                return None
            idle_w = bench.idle_power_w(plain, _IDLE_S)
    except OutOfTimeError:
        return None
    if idle_w is None:
        return None
    threads = plain.target.threads or default_threads(plain)
    return PowerModel(idle_w, max(0.0, busy.energy_j / busy.seconds - idle_w) / threads)
