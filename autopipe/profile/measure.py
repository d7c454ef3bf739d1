"""Latencies of a stage backend, measured in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from autopipe.core.backends.base import StageBackend

Clock = Callable[[], float]
Samples = dict[tuple[int, int], list[float]]
"""Seconds by (context, tokens)."""

_PASS_S = 25.0
"""No repeats of a set of points are begun after so many seconds: very slow models are measured once."""
_SETTLE = 2
"""Forwards that do not count after a cache has been filled."""


def verify_points(
    backend: StageBackend,
    contexts: Sequence[int],
    tokens: Sequence[int],
    repeats: int,
    clock: Clock = time.monotonic,
) -> dict[str, list[dict[str, Any]]]:
    """Latency of `forward` of n tokens behind each context, for each n of `tokens` that fits.

    All points take their turn before the next repeat, so that a slow moment of the machine hits all of them.

    Args:
        contexts: tokens in the cache before the forward, ascending.
        tokens: ascending, so that a forward follows one of nearly its size, as in use.

    Returns:
        `verify`: the points; `catch_up`: of the prefills by which the cache grew from one context to the next.
    """
    backend.prepare_best()
    verify: Samples = {}
    catch_up: Samples = {}
    deadline = clock() + _PASS_S
    for repeat in range(repeats + 1):
        if repeat == 1:
            verify.clear()  # the first round warms up
        if repeat > 1 and clock() > deadline:
            break
        backend.reset()
        for context in contexts:
            grown_from, missing = backend.length, context - backend.length
            started = clock()
            backend.prefill(_ids(backend, missing))
            if grown_from:
                catch_up.setdefault((grown_from, missing), []).append(clock() - started)
            fitting = [n for n in tokens if context + n <= backend.max_length]
            for n in fitting[:1] * _SETTLE:  # a forward right behind a large one is slower than in a row of its like
                _timed(backend, context, n, backend.best, clock)
            for n in fitting:
                seconds = _timed(backend, context, n, backend.best, clock)
                verify.setdefault((context, n), []).append(seconds)
    backend.reset()
    return {"verify": _points(verify), "catch_up": _points(catch_up)}


def prefill_points(
    backend: StageBackend,
    context: int,
    tokens: Sequence[int],
    repeats: int,
    clock: Clock = time.monotonic,
) -> list[dict[str, Any]]:
    """Latency of `prefill` of n tokens behind `context` tokens (0: of a prompt), for each n of `tokens` that fits."""
    wanted = [n for n in tokens if context + n <= backend.max_length]
    _fill(backend, context)
    samples: Samples = {}
    deadline = clock() + _PASS_S
    for repeat in range(repeats):
        for n in wanted:
            if not repeat or clock() < deadline:
                seconds = _timed(backend, context, n, backend.prefill, clock)
                samples.setdefault((context, n), []).append(seconds)
    backend.reset()
    return _points(samples)


def spin(backend: StageBackend, context: int, tokens: int, seconds: float) -> list[tuple[float, float]]:
    """Forwards of `tokens` tokens one after another for `seconds`; start and end of each, in seconds."""
    context = min(context, max(1, backend.max_length - tokens))
    backend.prepare_best()
    _fill(backend, context)
    times: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    while not times or times[-1][1] < end:
        started = time.monotonic()
        backend.best(_ids(backend, tokens))
        times.append((started, time.monotonic()))
        backend.rollback(context)
    backend.reset()
    return times


def _timed(
    backend: StageBackend,
    context: int,
    num_tokens: int,
    append: Callable[[Sequence[int]], object],
    clock: Clock,
) -> float:
    ids = _ids(backend, num_tokens)
    started = clock()
    append(ids)
    seconds = clock() - started
    backend.rollback(context)
    return seconds


def _points(samples: Samples) -> list[dict[str, Any]]:
    return [
        {
            "context": context,
            "tokens": n,
            "seconds": statistics.median(seconds),
            "p90_s": sorted(seconds)[round(0.9 * (len(seconds) - 1))],
        }
        for (context, n), seconds in samples.items()
    ]


def _fill(backend: StageBackend, context: int) -> None:
    backend.reset()
    if context:
        backend.prefill(_ids(backend, context))


def _ids(backend: StageBackend, count: int) -> list[int]:
    """Token ids of no meaning, spread over the vocabulary."""
    return [(7919 * place + 11) % backend.vocab_size for place in range(count)]
