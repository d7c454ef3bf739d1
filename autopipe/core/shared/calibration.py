"""What a target's steps cost by rows, before its first request: its drafts are then weighed sensibly from the start."""

from __future__ import annotations

import time

from autopipe.core.backends.batch import BatchRunner
from autopipe.core.gating import StepCosts
from autopipe.core.plan import EmulatedStage

_MAX_MEASURE_S = 0.6
_PROMPT_TOKENS = 16
_SIZES = (1, 1, 2, 4, 8, 16, 32)


def measure(runner: BatchRunner, costs: StepCosts, emulated: EmulatedStage | None) -> None:
    """Time a few steps, for 0.6 s at most; an emulated target is taken at its word. The runner is empty afterwards."""
    if emulated is not None:
        for num_rows, milliseconds in emulated.ms.items():
            costs.observe(num_rows, max(milliseconds / 1e3, 1e-9))
        return
    prompt = [0] * min(_PROMPT_TOKENS, runner.max_length // 2)
    runner.prepare_best()
    deadline = time.monotonic() + _MAX_MEASURE_S
    if not prompt:
        return
    for _ in range(2):  # the first pass pays for what is set up lazily
        runner.reset(0)
        runner.forward([(0, prompt, 1)])
    for num_rows in _SIZES * 3:
        if time.monotonic() > deadline or len(prompt) + num_rows > runner.max_length:
            break
        started = time.monotonic()
        runner.best([(0, [0] * num_rows, num_rows)])
        costs.observe(num_rows, max(time.monotonic() - started, 1e-9))
        runner.rollback(0, len(prompt))
    runner.reset(0)
