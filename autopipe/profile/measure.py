"""Latencies of a stage backend, measured in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from autopipe.core.backends.base import StageBackend

_PASS_S = 20.0
"""No further repeats of a set of points are begun after so many seconds: slow models are measured once."""


def verify_points(
    backend: StageBackend, context: int, tokens: Sequence[int], repeats: int, clock: Callable[[], float] = time.monotonic
) -> list[dict[str, Any]]:
    """Latency of `forward` of n tokens behind `context` tokens, for each n of `tokens` that fits.

    All points take their turn before the next repeat, so that a slow moment of the machine hits all of them.
    """
    wanted = [n for n in tokens if context + n <= backend.max_length]
    _fill(backend, context)
    samples = _rounds(wanted, repeats, lambda n: _timed(backend, context, n, backend.forward, clock), clock)
    backend.reset()
    return _points(context, samples)


def prefill_points(
    backend: StageBackend, context: int, tokens: Sequence[int], repeats: int, clock: Callable[[], float] = time.monotonic
) -> list[dict[str, Any]]:
    """Latency of `prefill` of n tokens behind `context` tokens (0: of a prompt), for each n of `tokens` that fits."""
    wanted = [n for n in tokens if context + n <= backend.max_length]
    _fill(backend, context)
    samples = _rounds(wanted, repeats, lambda n: _timed(backend, context, n, backend.prefill, clock), clock)
    backend.reset()
    return _points(context, samples)


def spin(backend: StageBackend, context: int, tokens: int, seconds: float) -> list[tuple[float, float]]:
    """Forwards of `tokens` tokens one after another for `seconds`; start and end of each, in seconds."""
    context = min(context, max(1, backend.max_length - tokens))
    _fill(backend, context)
    times: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    while not times or times[-1][1] < end:
        started = time.monotonic()
        backend.forward(_ids(backend, tokens))
        times.append((started, time.monotonic()))
        backend.rollback(context)
    backend.reset()
    return times


def _rounds(
    wanted: Sequence[int], repeats: int, measure: Callable[[int], float], clock: Callable[[], float]
) -> dict[int, list[float]]:
    """Seconds by number of tokens. The first round warms up and does not count, unless it was very slow."""
    deadline = clock() + _PASS_S
    warm_up = {n: [measure(n)] for n in wanted}
    samples: dict[int, list[float]] = {n: [] for n in wanted}
    for _ in range(repeats):
        if clock() > deadline:
            break
        for n in wanted:
            samples[n].append(measure(n))
    return {n: samples[n] or warm_up[n] for n in wanted}


def _timed(
    backend: StageBackend,
    context: int,
    num_tokens: int,
    append: Callable[[Sequence[int]], object],
    clock: Callable[[], float],
) -> float:
    ids = _ids(backend, num_tokens)
    started = clock()
    append(ids)
    seconds = clock() - started
    backend.rollback(context)
    return seconds


def _points(context: int, samples: dict[int, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "context": context,
            "tokens": n,
            "seconds": statistics.median(seconds),
            "p90_s": sorted(seconds)[min(len(seconds) - 1, round(0.9 * (len(seconds) - 1)))],
        }
        for n, seconds in samples.items()
    ]


def _fill(backend: StageBackend, context: int) -> None:
    backend.reset()
    if context:
        backend.prefill(_ids(backend, context))


def _ids(backend: StageBackend, count: int) -> list[int]:
    """Token ids of no meaning, spread over the vocabulary."""
    return [(7919 * place + 11) % backend.vocab_size for place in range(count)]
