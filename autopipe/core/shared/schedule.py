"""Who is served in a step: pure functions over the active requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopipe.core.shared.options import SharingOptions
from autopipe.core.shared.sequence import SharedRequest


class Chunk(NamedTuple):
    """Prompt tokens of one request to read in a step."""

    request: SharedRequest
    num_tokens: int


def choose_answering(
    active: Sequence[SharedRequest], max_batch: int, *, whole_prompts: bool = False
) -> list[SharedRequest]:
    """Those to get a token in this step: the ones served longest ago, of those whose prompts have been read."""
    ready = [request for request in active if request.is_answering(whole_prompts=whole_prompts)]
    return sorted(ready, key=lambda request: request.served_step)[:max_batch]


def choose_prompt(active: Sequence[SharedRequest], num_answering: int, options: SharingOptions) -> list[Chunk]:
    """What to read in this step where prompts are read whole: the prompt of the request that has been active longest,
    or some of what it had been given after that.

    Args:
        active: oldest first.
    """
    reading = (request for request in active if not request.is_answering(whole_prompts=True))
    first = next(reading, None)
    if first is None:
        return []
    prompt_left = first.prompt_length - first.cached
    budget = options.prefill_rows if num_answering else options.prefill_rows_alone
    return [Chunk(first, prompt_left if prompt_left > 0 else min(first.missing, budget))]


def choose_chunks(active: Sequence[SharedRequest], num_answering: int, options: SharingOptions) -> list[Chunk]:
    """What to read of prompts in this step.

    Half of the rows go to the request that has been active longest, so that none starves; the other half to the one
    that has least to read, so that short prompts do not wait for long ones. What either leaves goes to the next.

    Args:
        active: oldest first.
    """
    reading = [request for request in active if request.missing > 1]
    if not reading:
        return []
    budget = options.prefill_rows if num_answering else options.prefill_rows_alone
    budget = min(budget, options.max_rows - num_answering)
    taken: dict[int, Chunk] = {}
    oldest_share = min(reading[0].missing, -(-budget // 2))
    if oldest_share > 0:
        taken[reading[0].id] = Chunk(reading[0], oldest_share)
    budget -= oldest_share
    for request in sorted(reading, key=lambda request: request.missing):
        before = taken[request.id].num_tokens if request.id in taken else 0
        more = min(request.missing - before, budget)
        if more <= 0:
            continue
        taken[request.id] = Chunk(request, before + more)
        budget -= more
    return list(taken.values())


def who_gives_way(active: Sequence[SharedRequest], quantum_tokens: int) -> SharedRequest | None:
    """The active request that has had most since it became active, if it has had its share."""
    longest = max(active, key=lambda request: request.since_active, default=None)
    return longest if longest is not None and longest.since_active >= quantum_tokens else None
