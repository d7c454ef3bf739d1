"""How many drafts are worth verifying: measured step costs against the drafter's confidence."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from autopipe.core.errors import ConfigError

_PRIOR_SHAPE = ((1, 1.0), (2, 1.05), (4, 1.11), (8, 1.26), (12, 1.47), (16, 2.1), (32, 3.6), (64, 7.2))
"""t(n) / t(1) where nothing was measured: the fused bf16 target on two CPU cores (11 ms for one token)."""

_DEFAULT_STEP_S = 0.011
_LEVEL_STEP = 0.1
"""Share of a surprise that the level, common to all n, takes up at once."""
_SHAPE_STEP = 0.02
"""Smallest share of a surprise that the estimate for this n takes up."""
_CLIP = 0.25
"""Largest surprise (a log ratio) learned from at once: one stalled step (swapping, another process) teaches
little."""
_CHANGE_AFTER = 8
"""So many clipped surprises in a row, all up or all down, are no stalls but a change of speed: the level jumps."""
_FIRST = 5
"""The first observations of an n give its median."""
_RECENT = 32
_REFRESH_EVERY = 16


class StepCosts:
    """Online estimate of t(n): seconds of one consumer forward of n tokens.

    Model: log t(n) = level + shape(n). The level follows the machine (its load, the length of the context)
    quickly and learns from every forward; the shape learns slowly, each n for itself, and the less the more of
    the last forwards had this very n (when only one n runs, a surprise says nothing about the shape). So an n
    that has not run for a while rises and falls with the rest. Surprises are clipped. Between seen n the ratio to
    a prior shape is interpolated, after the seen points were made monotone in n by isotonic regression (pool
    adjacent violators, weighted by counts).

    Args:
        measured: seconds by number of tokens, from a warm-up, to start from; none: a prior shape.

    Raises:
        ConfigError: a number of tokens below 1, or seconds that are not positive and finite.
    """

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        measured = dict(measured or {})
        for num_tokens, seconds in measured.items():
            _check(num_tokens, seconds)
        self._scaled = bool(measured)
        self._level = math.log(measured[min(measured)] if measured else _DEFAULT_STEP_S)
        self._shape = {n: math.log(seconds) - self._level for n, seconds in sorted(measured.items())}
        self._count = dict.fromkeys(measured, _FIRST)
        self._first: dict[int, list[float]] = {}
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._clipped_in_a_row = 0  # negative: downwards
        self._since_refresh = 0
        self._knots: list[int] = []
        self._ratios: list[float] = []
        self._curve: list[float] = []
        self._refresh()

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A forward of `num_tokens` took `seconds`.

        Raises:
            ConfigError: `num_tokens` below 1, or `seconds` not positive and finite.
        """
        _check(num_tokens, seconds)
        log_seconds = math.log(seconds)
        if not self._scaled:
            self._scaled = True
            self._level = log_seconds - math.log(self._relative(num_tokens))
        self._recent.append(num_tokens)
        count = self._count[num_tokens] = self._count.get(num_tokens, 0) + 1
        self._since_refresh += 1
        if count <= _FIRST:
            first = self._first.setdefault(num_tokens, [])
            first.append(log_seconds - self._level)
            self._shape[num_tokens] = median(first)
            self._refresh()
            return
        surprise = log_seconds - self._level - self._shape[num_tokens]
        clipped = max(-_CLIP, min(_CLIP, surprise))
        share = self._recent.count(num_tokens) / len(self._recent)
        self._shape[num_tokens] += max(_SHAPE_STEP, 1 / count) * (1 - share) * clipped
        self._learn_level(surprise, clipped)
        if self._since_refresh >= _REFRESH_EVERY:
            self._refresh()

    def seconds(self, num_tokens: int) -> float:
        """Estimated seconds of a forward of `num_tokens` (at least 1); never falls as `num_tokens` grows.

        Raises:
            ConfigError: `num_tokens` below 1.
        """
        if num_tokens < 1:
            raise ConfigError("num_tokens", num_tokens, "at least 1")
        return math.exp(self._level) * self._relative(num_tokens)

    def _learn_level(self, surprise: float, clipped: float) -> None:
        if surprise == clipped:
            self._clipped_in_a_row = 0
        else:
            run = self._clipped_in_a_row
            self._clipped_in_a_row = max(run, 0) + 1 if surprise > 0 else min(run, 0) - 1
        if abs(self._clipped_in_a_row) >= _CHANGE_AFTER:
            self._clipped_in_a_row = 0
            self._level += surprise
        else:
            self._level += _LEVEL_STEP * clipped

    def _relative(self, num_tokens: int) -> float:
        """t(n) / exp(level)."""
        curve = self._curve
        while len(curve) < num_tokens:
            n = len(curve) + 1
            value = _prior(n) * _interpolate(n, self._knots, self._ratios)
            curve.append(max(value, curve[-1]) if curve else value)
        return curve[num_tokens - 1]

    def _refresh(self) -> None:
        """Fit the curve anew to the learned shape."""
        self._since_refresh = 0
        self._knots = sorted(self._shape)
        fitted = _isotonic([math.exp(self._shape[n]) for n in self._knots], [self._count[n] for n in self._knots])
        self._ratios = [value / _prior(n) for n, value in zip(self._knots, fitted, strict=True)]
        self._curve = []


def best_length(confidence: Sequence[float], costs: StepCosts, overhead_s: float = 0.0) -> int:
    """The number of drafts to verify: 0 (a plain step) to len(confidence).

    With d drafts a step emits E(d) = 1 + sum_{j<=d} prod_{i<=j} confidence_i tokens on average and takes
    t(d + 1) + overhead_s seconds. The d with the largest E(d) / (t(d + 1) + overhead_s) is chosen: right if all
    steps were alike, and its expected goodput is never below that of a plain step. In theory, steps not being alike,
    E(d) - r t(d + 1) is the better goal, r the best goodput there is (a fractional programme, Dinkelbach 1967);
    replayed on answers of the demo model it was worse, as r has to be estimated over stretches that are not alike.
    No drafts are verified for exploration's sake: the drafter learns from drafts that were held back as well.

    Args:
        confidence: chance that each draft is accepted, given that all before it were.
        costs: of the consumer that verifies.
        overhead_s: seconds of a step beside the forward.
    """
    chain = expected = 1.0
    best, best_value = 0, -math.inf
    for num_drafts in range(len(confidence) + 1):
        if num_drafts:
            chain *= confidence[num_drafts - 1]
            expected += chain
        value = expected / (costs.seconds(num_drafts + 1) + overhead_s)
        if value > best_value:
            best, best_value = num_drafts, value
    return best


def _check(num_tokens: int, seconds: float) -> None:
    if num_tokens < 1:
        raise ConfigError("num_tokens", num_tokens, "at least 1")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError("seconds", seconds, "a positive, finite number of seconds")


def _prior(num_tokens: int) -> float:
    """The prior shape at n, linear between its points and proportional to n beyond them."""
    last_n, last = _PRIOR_SHAPE[-1]
    if num_tokens >= last_n:
        return last * num_tokens / last_n
    return _interpolate(num_tokens, [n for n, _ in _PRIOR_SHAPE], [value for _, value in _PRIOR_SHAPE])


def _interpolate(x: int, knots: Sequence[int], values: Sequence[float]) -> float:
    """Linear between knots, constant beyond the ends; 1 without knots."""
    if not knots:
        return 1.0
    right = bisect_left(knots, x)
    if right == 0:
        return values[0]
    if right == len(knots):
        return values[-1]
    left = right - 1
    share = (x - knots[left]) / (knots[right] - knots[left])
    return values[left] + share * (values[right] - values[left])


def _isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (mean_a, weight_a, length_a), (mean_b, weight_b, length_b) = blocks[-2:]
            total = weight_a + weight_b
            blocks[-2:] = [((mean_a * weight_a + mean_b * weight_b) / total, total, length_a + length_b)]
    return [mean for mean, _, length in blocks for _ in range(length)]
