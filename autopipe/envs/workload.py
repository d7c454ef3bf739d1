"""The work of a simulated episode: which requests come, when, and how hard each position of their text is.

Everything is drawn from the episode's seed and the request's number, never from what a policy does, so that two
policies under one seed meet the same requests with the same texts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        start_token: output tokens of the episode before it.
        gap_s: seconds after the arrival before it; None: it arrives when the request before it is done.
        uniform, coin: random numbers by position, see `simulator.draw_picks`.
    """

    start_token: int
    kind: PromptKind
    prompt_tokens: int
    output_tokens: int
    gap_s: float | None
    uniform: NDArray[np.float64] = field(repr=False)
    coin: NDArray[np.float64] = field(repr=False)


def draw_requests(scenario: Scenario, seed: int) -> list[Request]:
    """All requests of an episode; the last one is cut to the end of the work."""
    phases = list(scenario.phases)
    ends = np.cumsum([phase.tokens for phase in phases]).tolist()
    token, requests = 0, list[Request]()
    while token < scenario.total_tokens:
        rng = np.random.default_rng([seed, len(requests)])
        phase = phases[bisect_right(ends, token % ends[-1])]
        kinds = list(phase.kinds)
        weights = np.array([phase.kinds[kind] for kind in kinds])
        output = int(rng.integers(phase.output_tokens.low, phase.output_tokens.high + 1))
        output = min(output, scenario.total_tokens - token)
        requests.append(
            Request(
                start_token=token,
                kind=kinds[int(rng.choice(len(kinds), p=weights / weights.sum()))],
                prompt_tokens=int(rng.integers(phase.prompt_tokens.low, phase.prompt_tokens.high + 1)),
                output_tokens=output,
                gap_s=None if phase.arrivals_per_s is None else float(rng.exponential(1 / phase.arrivals_per_s)),
                uniform=persistent_uniform(rng, output, scenario.pipeline.persistence),
                coin=rng.random(output),
            )
        )
        token += output
    return requests


def persistent_uniform(rng: np.random.Generator, count: int, persistence: float) -> NDArray[np.float64]:
    """Uniform numbers of which each repeats the one before it with chance `persistence`, float64 [count]."""
    fresh = rng.random(count)
    if persistence == 0:
        return fresh
    repeats = rng.random(count) < persistence
    repeats[0] = False
    source = np.maximum.accumulate(np.where(repeats, 0, np.arange(count)))
    repeated: NDArray[np.float64] = fresh[source]
    return repeated


class Arrivals:
    """When requests arrive, as time goes by."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self._arrived_s = 0.0
        self._index = -1

    def next(self, now_s: float) -> float:
        """Arrival of the next request, which is taken up at the earliest at `now_s`, when the last one is done."""
        self._index += 1
        gap_s = self.requests[self._index].gap_s
        if gap_s is None:
            self._arrived_s = now_s
        else:
            open_before = self._index > 0 and self.requests[self._index - 1].gap_s is not None
            self._arrived_s = gap_s + (self._arrived_s if open_before else now_s)
        return self._arrived_s

    def waiting(self, now_s: float) -> int:
        """Requests that have arrived by `now_s` and wait behind the one under way."""
        count, arrival_s = 0, self._arrived_s
        for request in self.requests[self._index + 1 :]:
            if request.gap_s is None:
                break
            arrival_s += request.gap_s
            if arrival_s > now_s:
                break
            count += 1
        return count
