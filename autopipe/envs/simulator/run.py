"""Run simulated requests: the whole of them at once, or interval by interval with plans that change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Mode, WarmupKind
from autopipe.envs.simulator import kernel
from autopipe.envs.simulator.agreement import draw_picks
from autopipe.envs.simulator.model import LocalDrafts, SimChain, SimRequest

TABLE_ROWS = 256
"""Latency tables go up to this many tokens; beyond, the kernel goes on along the last slope."""

_BINS = 130

_NO_DRAFTS = LocalDrafts(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros((1, 1)))

# Names of the kernel's columns of `count`, in its order.
_COUNTS = ("forwards", "rows", "proposed", "accepted", "emitted", "rollbacks", "discarded", "caught_up")


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage did.

    Attributes:
        forwards: forwards, prefills included. rows: tokens forwarded. proposed: drafts it verified, of which
            `accepted`. emitted: tokens it appended. discarded: tokens it lost to its `rollbacks`. caught_up:
            rows it forwarded only because it had fallen behind.
        acceptance_lengths: forwards by number of tokens emitted.
    """

    name: str
    forwards: int
    rows: int
    proposed: int
    accepted: int
    emitted: int
    rollbacks: int
    discarded: int
    caught_up: int
    busy_s: float
    acceptance_lengths: tuple[int, ...]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of the drafts it verified; None if it verified none."""
        return self.accepted / self.proposed if self.proposed else None


@dataclass(frozen=True, slots=True)
class SimResult:
    """What simulated requests took.

    Attributes:
        tokens: output tokens of all requests. total_s: seconds of all requests, one after another.
        ttft_s: mean seconds to the first token.
        emitted_s: when each token left the target, seconds from the start of the first request, float64
            [tokens].
        timeline: forwards in order of their end: stage, start_s, end_s, rows, drafts, emitted; float64
            [events, 6].
    """

    tokens: int
    total_s: float
    ttft_s: float
    stages: tuple[StageResult, ...]
    emitted_s: NDArray[np.float64]
    timeline: NDArray[np.float64]

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per output token, prefill included."""
        return 1e3 * self.total_s / self.tokens

    @property
    def acceptance_length(self) -> float:
        """Mean tokens the target emits per forward."""
        return self.stages[-1].emitted / self.stages[-1].forwards

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready summary, without token times and timeline."""
        stages = [{**asdict(stage), "acceptance_rate": stage.acceptance_rate} for stage in self.stages]
        return {
            "tokens": self.tokens,
            "total_s": self.total_s,
            "ttft_s": self.ttft_s,
            "ms_per_token": self.ms_per_token,
            "acceptance_length": self.acceptance_length,
            "stages": stages,
        }


class SimRun:
    """One simulated request that can be advanced piece by piece.

    Args:
        picks: picks of the stages, int8 [K, output_tokens], see `draw_picks`.
        start_s: the clock at the start.
        max_events: forwards kept for the timeline.
        skip_prefill: begin with the prompt in every cache.
        first: position of the request's first output token in the tables of an n-gram drafter.
    """

    def __init__(
        self,
        chain: SimChain,
        request: SimRequest,
        picks: kernel.Codes,
        *,
        start_s: float = 0.0,
        max_events: int = 0,
        skip_prefill: bool = False,
        first: int = 0,
    ) -> None:
        self.request = request
        self.now_s = start_s
        self._first = first
        self.emitted_s = np.zeros(request.output_tokens)
        self.timeline = np.zeros((max_events, 6))
        self._num_events = np.zeros(1, dtype=np.int64)
        self._take(chain, picks)
        count = len(self.chain.stages)
        self.sequence: kernel.Codes = np.zeros((count, request.output_tokens), dtype=np.int8)
        self.length_of = np.zeros((count, 4), dtype=np.int64)
        self.length_of[:, kernel.CACHED] = 0 if skip_prefill else -1
        self.length_of[:, kernel.DRAFTS] = -1
        self._reset_counts(count)

    @property
    def tokens(self) -> int:
        """Tokens the target has emitted."""
        return int(self.length_of[-1, kernel.HELD])

    @property
    def done(self) -> bool:
        return self.tokens >= self.request.output_tokens

    def advance(self, num_tokens: int | None = None) -> int:
        """Run until the target has `num_tokens` more (None: to the end); return how many it emitted."""
        before, end = self.tokens, self.request.output_tokens
        goal = end if num_tokens is None else min(before + num_tokens, end)
        now_s = kernel.advance(
            kernel.ASYNC if self.chain.mode is Mode.ASYNC else kernel.LOCKSTEP,
            goal,
            end,
            self.now_s,
            *self._settings,
            self._picks,
            self.sequence,
            self.length_of,
            self.clock,
            self.count,
            self.busy_s,
            self.emitted_s,
            self.histogram,
            self.timeline,
            self._num_events,
        )
        self.now_s = float(now_s)
        return self.tokens - before

    def stage_results(self) -> tuple[StageResult, ...]:
        """What each stage did since the start or the last `switch`."""
        return tuple(
            StageResult(
                name=stage.name or f"stage {index}",
                **dict(zip(_COUNTS, self.count[index].tolist(), strict=True)),
                busy_s=float(self.busy_s[index]),
                acceptance_lengths=tuple(np.trim_zeros(self.histogram[index], "b").tolist()),
            )
            for index, stage in enumerate(self.chain.stages)
        )

    def events(self) -> NDArray[np.float64]:
        """The timeline so far, float64 [events, 6]."""
        return self.timeline[: self._num_events[0]]

    def retune(self, chain: SimChain) -> None:
        """Other windows, minimum drafts, mode or warm-up, at once; the stages stay (see `switch`).

        Raises:
            ConfigError: another number of stages.
        """
        if len(chain.running().stages) != len(self.chain.stages):
            raise ConfigError("chain", len(chain.stages), f"{len(self.chain.stages)} stages")
        self._take(chain, self._picks)

    def switch(self, chain: SimChain, picks: kernel.Codes, kept: Sequence[int | None]) -> None:
        """Another chain between two steps: the target's forward ends first, those of drafters are dropped.

        All drafters adopt the target's text. A stage that was there keeps what its cache shares with it; a
        new one starts at nothing, so its first forward is a prefill; it also waits for its `switch_s`.

        Args:
            picks: of the new chain's stages, int8 [K, output_tokens].
            kept: for each stage of the new chain that computes (`SimChain.running`), its index among those of the
                old one, or None. The target must be kept last.
        """
        old_length, old_clock, old_sequence = self.length_of, self.clock, self.sequence
        if self.length_of[-1, kernel.DRAFTS] >= 0:
            self.advance(1)
            old_length, old_clock, old_sequence = self.length_of, self.clock, self.sequence
        self._take(chain, picks)
        stages = self.chain.stages
        held = self.tokens
        self.sequence = np.repeat(old_sequence[-1:], len(stages), axis=0)
        self.length_of = np.zeros((len(stages), 4), dtype=np.int64)
        self._reset_counts(len(stages))
        for index, old in enumerate(kept):
            common, cached, penalty_s = held, -1, stages[index].switch_s
            if old is not None:
                agreed = old_sequence[old, :held] == old_sequence[-1, :held]
                common = int(np.argmin(agreed)) if not agreed.all() else held
                cached = min(int(old_length[old, kernel.CACHED]), common)
                penalty_s = float(old_clock[old, kernel.PENALTY_S])
            self.length_of[index] = (held, cached, held, -1)
            self.clock[index, kernel.PENALTY_S] = penalty_s

    def _reset_counts(self, num_stages: int) -> None:
        self.clock = np.zeros((num_stages, 3))
        self.count = np.zeros((num_stages, kernel.NUM_COUNTS), dtype=np.int64)
        self.busy_s = np.zeros(num_stages)
        self.histogram = np.zeros((num_stages, _BINS), dtype=np.int64)

    def _take(self, chain: SimChain, picks: kernel.Codes) -> None:
        """Turn settings into the kernel's arrays."""
        self.chain = running = chain.running()
        stages = running.stages
        drafter = chain.local_drafter
        offer = _NO_DRAFTS if drafter is None or drafter.drafts is None else drafter.drafts
        offer = offer.window_of(self._first, self.request.output_tokens)
        overhead_s = np.array([stage.overhead_s for stage in stages])
        overhead_s[0] += 0.0 if drafter is None else drafter.overhead_s
        self._picks = np.ascontiguousarray(picks[-len(stages) :])
        warmup, end = running.warmup, self.request.output_tokens
        conservative = int(np.ceil(warmup.fraction * end)) if warmup.kind is WarmupKind.CONSERVATIVE else 0
        every = warmup.double_every if warmup.kind is WarmupKind.PROGRESSIVE else 0
        prompt = self.request.prompt_tokens
        self._settings = (
            np.array([stage.window for stage in stages], dtype=np.int64),
            np.array([stage.min_drafts for stage in stages], dtype=np.int64),
            np.array([stage.verify_cap for stage in stages], dtype=np.int64),
            np.array([stage.step_alone for stage in stages], dtype=np.int64),
            np.array([warmup.start_window, conservative, every], dtype=np.int64),
            np.array([stage.prompt_s(prompt) for stage in stages]),
            np.array([stage.latency.table(TABLE_ROWS) for stage in stages]),
            overhead_s,
            np.array([stage.rollback_s for stage in stages]),
            running.contention_matrix(),
            np.array([0 if drafter is None else drafter.window, offer.gate], dtype=np.int64),
            offer.length,
            offer.right,
            offer.confidence,
        )


def simulate(
    chain: SimChain,
    requests: Sequence[SimRequest] | int,
    *,
    seed: int = 0,
    skip_prefill: bool = False,
    max_events: int = 0,
) -> SimResult:
    """Simulate requests one after another; the result is a function of the arguments.

    Args:
        requests: the requests, or a number of output tokens of a single one.
        seed: of the agreement of stages without a table.
        skip_prefill: begin each request with the prompt in every cache.
        max_events: forwards kept for the timeline, in all.

    Raises:
        ConfigError: no requests.
    """
    requests = [SimRequest(requests)] if isinstance(requests, int) else list(requests)
    if not requests:
        raise ConfigError("requests", [], "one or more requests")
    rng = np.random.default_rng(seed)
    now_s, first = 0.0, 0
    runs: list[SimRun] = []
    ttfts: list[float] = []
    for request in requests:
        picks = draw_picks(chain, request.output_tokens, rng, first)
        run = SimRun(
            chain,
            request,
            picks,
            start_s=now_s,
            max_events=max_events,
            skip_prefill=skip_prefill,
            first=first,
        )
        run.advance()
        ttfts.append(float(run.emitted_s[0]) - now_s)
        now_s, first = run.now_s, first + request.output_tokens
        max_events -= len(run.events())
        runs.append(run)
    return SimResult(
        tokens=first,
        total_s=now_s,
        ttft_s=float(np.mean(ttfts)),
        stages=_sum_stages(runs),
        emitted_s=np.concatenate([run.emitted_s for run in runs]),
        timeline=np.concatenate([run.events() for run in runs]),
    )


def _sum_stages(runs: Sequence[SimRun]) -> tuple[StageResult, ...]:
    """The stages' figures over all runs."""
    whole = runs[0]
    for run in runs[1:]:
        whole.count += run.count
        whole.busy_s += run.busy_s
        whole.histogram += run.histogram
    return whole.stage_results()
