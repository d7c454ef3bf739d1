"""What a stage's steps cost, before its first request: its gate then drafts sensibly, and a hung step is noticed."""

from __future__ import annotations

import time

from autopipe.core.backends.base import StageBackend
from autopipe.core.plan import EmulatedStage
from autopipe.core.stage_meter import StageMeter

_MAX_MEASURE_S = 0.3
_PROMPT_TOKENS = 16


def expect(meter: StageMeter, spec: EmulatedStage) -> None:
    """Take an emulated stage's word for it."""
    for num_tokens, milliseconds in spec.ms.items():
        meter.observe_step(num_tokens, milliseconds / 1e3)
    meter.observe_prefill(_PROMPT_TOKENS, (spec.prefill_ms or max(spec.ms.values())) / 1e3)


def measure(backend: StageBackend, meter: StageMeter) -> None:
    """Time a few steps of a real model, for 0.3 s at most; the backend is empty afterwards."""
    backend.prepare_best()
    deadline = time.monotonic() + _MAX_MEASURE_S
    prompt = [0] * min(_PROMPT_TOKENS, backend.max_length // 2)
    for _ in range(2):  # the first pass pays for what is set up lazily
        backend.reset()
        started = time.monotonic()
        backend.prefill(prompt)
        meter.observe_prefill(len(prompt), time.monotonic() - started)
    for num_tokens in (1, 1, 2, 4, 8, 12) * 3:
        if time.monotonic() > deadline or backend.length + num_tokens > backend.max_length:
            break
        length, started = backend.length, time.monotonic()
        backend.best([0] * num_tokens)
        meter.observe_step(num_tokens, time.monotonic() - started)
        backend.rollback(length)
    backend.reset()
