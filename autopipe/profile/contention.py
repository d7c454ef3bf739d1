"""How much two stages slow each other down when both compute."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autopipe.profile.process import StageProcess

_ALONE_S = 0.7
_TOGETHER_S = 1.4
_VERIFY_TOKENS = 4

Times = Sequence[Sequence[float]]
"""Start and end of each forward, seconds on one clock."""


def slow_down(upstream: StageProcess, downstream: StageProcess, *, context: int) -> tuple[float, float]:
    """Factors by which the two stages' forwards are slower together than alone.

    The upstream stage drafts (one token at a time), the downstream one verifies a few. Only forwards that lie
    wholly within the time in which both computed are counted.
    """
    shapes = ((upstream, 1), (downstream, _VERIFY_TOKENS))
    alone: list[Times] = [
        process.ask("spin", context=context, tokens=tokens, seconds=_ALONE_S) for process, tokens in shapes
    ]
    for process, tokens in shapes:
        process.send("spin", context=context, tokens=tokens, seconds=_TOGETHER_S)
    together: list[Times] = [process.receive() for process, _ in shapes]
    common = overlap(together)
    factors = [
        max(1.0, _median_s(within(both, common) or both) / max(_median_s(single), 1e-9))
        for single, both in zip(alone, together, strict=True)
    ]
    return factors[0], factors[1]


def overlap(lanes: Sequence[Times]) -> tuple[float, float]:
    """The time in which all lanes were at work."""
    return max(lane[0][0] for lane in lanes), min(lane[-1][1] for lane in lanes)


def within(times: Times, span: tuple[float, float]) -> Times:
    """The forwards that lie in `span`."""
    return [(start, end) for start, end in times if start >= span[0] and end <= span[1]]


def _median_s(times: Times) -> float:
    return statistics.median(end - start for start, end in times)
