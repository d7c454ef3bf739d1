"""How many drafts of each request are worth a row of the common step."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from autopipe.core.gating import StepCosts


def share_rows(
    confidences: Sequence[Sequence[float]], costs: StepCosts, base_rows: int, base_tokens: float, max_rows: int
) -> list[int]:
    """Numbers of drafts to verify, one per request.

    A step with k draft rows emits base_tokens + G(k) tokens on average and takes t(base_rows + k) seconds. The j-th
    draft of a request is worth its chance to be reached and accepted, c_1 c_2 ... c_j: falling in j, so the best k
    draft rows of all requests are found by taking the worthiest next one, again and again. Of these sets the one
    with the most tokens per second is chosen. For one request this is `gating.best_length`; with many, base_tokens
    are many and one more row costs as much as ever, so only likelier drafts pay.

    Args:
        confidences: per request, the chance that each draft is accepted given that all before it were.
        costs: t(n) of the target.
        base_rows: rows of the step without drafts.
        base_tokens: what these are worth in tokens.
        max_rows: most rows of a step.
    """
    worths = [list(accumulate(confidence, mul)) for confidence in confidences]
    heap = [(-worth[0], index, 0) for index, worth in enumerate(worths) if worth]
    heapq.heapify(heap)
    counts = [0] * len(worths)
    best, expected = list(counts), base_tokens
    best_rate = expected / costs.seconds(max(1, base_rows))
    rows = base_rows
    while heap and rows < max_rows:
        gain, index, place = heapq.heappop(heap)
        rows += 1
        expected -= gain
        counts[index] = place + 1
        if place + 1 < len(worths[index]):
            heapq.heappush(heap, (-worths[index][place + 1], index, place + 1))
        rate = expected / costs.seconds(rows)
        if rate > best_rate:
            best_rate, best = rate, list(counts)
    return best
