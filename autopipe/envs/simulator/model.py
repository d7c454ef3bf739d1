"""What the simulator is told: latency curves, agreement, requests and the pipeline's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.core.errors import ConfigError
from autopipe.core.plan import MAX_STAGES, Mode, Warmup


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """Seconds of a forward by its number of tokens.

    Attributes:
        points: seconds by number of tokens.
        interpolate: True: linear between points, and on along the last two beyond them. False: the largest
            point at or below n counts (what `emulated` stages do).

    Raises:
        ConfigError: no points, a number of tokens below 1, or seconds that are negative or not finite.
    """

    points: Mapping[int, float]
    interpolate: bool = True

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("latency", {}, "at least one point {tokens: seconds}")
        for num_tokens, seconds in self.points.items():
            if num_tokens < 1 or not 0 <= seconds < float("inf"):
                raise ConfigError("latency", {num_tokens: seconds}, "tokens >= 1 and finite seconds >= 0")

    def seconds(self, num_tokens: int) -> float:
        """Seconds of a forward of `num_tokens` (at least 1) tokens."""
        return float(self.table(num_tokens)[num_tokens])

    def table(self, max_tokens: int) -> NDArray[np.float64]:
        """Seconds for 0 .. max_tokens tokens, float64 [max_tokens + 1]; entry 0 equals entry 1."""
        known = sorted(self.points)
        values = np.array([self.points[n] for n in known])
        wanted = np.maximum(np.arange(max_tokens + 1), 1)
        if not self.interpolate or len(known) == 1:
            below = np.searchsorted(known, wanted, side="right") - 1
            steps: NDArray[np.float64] = values[np.maximum(below, 0)]
            return steps
        seconds: NDArray[np.float64] = np.interp(wanted, known, values)
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        beyond = wanted > known[-1]
        seconds[beyond] = values[-1] + max(slope, 0.0) * (wanted[beyond] - known[-1])
        return seconds


@dataclass(frozen=True, slots=True, eq=False)
class LocalDrafts:
    """What an n-gram drafter offers at each output position of a text, whatever the chain behind it.

    It learns from every token of the text, drafted or not, so its offers depend on the text alone.

    Attributes:
        length: drafts offered, int64 [n].
        right: of these, from the first on, equal to the text, int64 [n].
        confidence: the drafter's chance of each draft, given that those before it are right, float64 [n, most].
        gate: its consumer takes as many as pay; False: all that fit.

    Raises:
        ConfigError: arrays of different lengths, or empty.
    """

    length: NDArray[np.int64]
    right: NDArray[np.int64]
    confidence: NDArray[np.float64]
    gate: bool = True

    def __post_init__(self) -> None:
        sizes = (len(self.length), len(self.right), len(self.confidence))
        if 0 in sizes or len(set(sizes)) > 1:
            raise ConfigError("drafts", sizes, "arrays of one length, at least 1")
        widest = int(self.length.max())
        if self.confidence.ndim != 2 or self.confidence.shape[1] < widest:
            raise ConfigError("drafts.confidence", self.confidence.shape, f"[n, {widest}] or wider")

    def window_of(self, first: int, count: int) -> LocalDrafts:
        """Positions `first` .. `first + count - 1`, starting over at the end of the text."""
        at = np.arange(first, first + count) % len(self.length)
        return LocalDrafts(self.length[at], self.right[at], self.confidence[at], self.gate)


@dataclass(frozen=True, slots=True, eq=False)
class SimStage:
    """One stage of a simulated chain.

    Attributes:
        latency: seconds of a forward by number of tokens.
        agreement: chance to pick what the target picks, per position; nested (one uniform number per position
            for all stages: where a weaker stage agrees, so does a stronger). 1 for the target.
        table: instead of `agreement`, whether the stage agrees at each output position of the text (full
            information). Requests read on where the last one ended; the table starts over at its end.
        window: tokens the stage may be ahead of its consumer.
        min_drafts: drafts it waits for (async).
        verify_cap: most drafts in one forward.
        step_alone: with fewer than `min_drafts` waiting, forward without drafts instead of waiting (async).
        prefill_s: seconds of a prompt's prefill; None: by `prefill`.
        prefill: seconds of a prefill by number of tokens; None: as a forward of the prompt's tokens.
        drafts: first stage only: an n-gram drafter in its consumer's process, by what it offers at each position.
            It takes no time of its own but `overhead_s`, and `latency`, `agreement` and `table` do not count.
        overhead_s: seconds of a step beside the forward (an n-gram drafter's: of its consumer's step).
        rollback_s: seconds that a rollback adds to the next step.
        switch_s: seconds until the stage can compute when a plan takes it in.
    """

    latency: LatencyCurve
    agreement: float = 1.0
    table: NDArray[np.bool_] | None = None
    name: str = ""
    window: int = 4
    min_drafts: int = 1
    verify_cap: int = 128
    step_alone: bool = False
    prefill_s: float | None = None
    overhead_s: float = 0.0
    rollback_s: float = 0.0
    switch_s: float = 0.0
    prefill: LatencyCurve | None = None
    drafts: LocalDrafts | None = None

    def prompt_s(self, prompt_tokens: int) -> float:
        """Seconds of a prompt's prefill."""
        if self.prefill_s is not None:
            return self.prefill_s
        return (self.prefill or self.latency).seconds(prompt_tokens)

    def __post_init__(self) -> None:
        _check("agreement", self.agreement, 0.0, 1.0)
        _check("window", self.window, 1, None)
        _check("min_drafts", self.min_drafts, 0, None)
        _check("verify_cap", self.verify_cap, 1, None)
        for key in ("overhead_s", "rollback_s", "switch_s"):
            _check(key, getattr(self, key), 0.0, None)
        if self.prefill_s is not None:
            _check("prefill_s", self.prefill_s, 0.0, None)
        if self.table is not None and len(self.table) == 0:
            raise ConfigError("table", "empty", "agreement at one or more positions")


@dataclass(frozen=True, slots=True)
class SimChain:
    """A chain and how it runs.

    Attributes:
        stages: cheapest drafter first, the target last.
        contention: factor by which stage i's forward is slower while stage j computes, [i][j]; None: no
            contention.
        wrong_equal: chance that two neighbours that both pick wrongly pick the same token.
    """

    stages: tuple[SimStage, ...]
    mode: Mode = Mode.ASYNC
    warmup: Warmup = field(default_factory=Warmup)
    contention: Sequence[Sequence[float]] | None = None
    wrong_equal: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.stages)
        if not 1 <= count <= MAX_STAGES:
            raise ConfigError("chain", f"{count} stages", f"1 to {MAX_STAGES} stages")
        target = self.stages[-1]
        if target.agreement != 1 or (target.table is not None and not target.table.all()):
            raise ConfigError(f"chain.{count - 1}.agreement", target.agreement, "1, without a table")
        if any(stage.drafts is not None for stage in self.stages[1:]) or target.drafts is not None:
            raise ConfigError("drafts", "given", "only in the first stage of a chain that ends in a target")
        _check("wrong_equal", self.wrong_equal, 0.0, 1.0)
        matrix = self.contention_matrix()
        if matrix.shape != (count, count) or not (np.isfinite(matrix) & (matrix > 0)).all():
            raise ConfigError("contention", self.contention, f"{count} x {count} positive factors")

    def contention_matrix(self) -> NDArray[np.float64]:
        """Slow-down factors, float64 [K, K]."""
        count = len(self.stages)
        if self.contention is None:
            return np.ones((count, count))
        return np.array(self.contention, dtype=np.float64)

    @property
    def local_drafter(self) -> SimStage | None:
        """The n-gram drafter in the process of the first stage that computes, if there is one at work."""
        first = self.stages[0]
        return None if self.mode is Mode.PLAIN or first.drafts is None else first

    def running(self) -> SimChain:
        """The chain of stages that compute: in plain mode the target alone; never a stage with `drafts`."""
        first = len(self.stages) - 1 if self.mode is Mode.PLAIN else 0 if self.local_drafter is None else 1
        if first == 0:
            return self
        matrix = None if self.contention is None else [row[first:] for row in self.contention[first:]]
        return replace(self, stages=self.stages[first:], contention=matrix)


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request: tokens of its prompt, and output tokens until it ends."""

    output_tokens: int
    prompt_tokens: int = 1

    def __post_init__(self) -> None:
        _check("output_tokens", self.output_tokens, 1, None)
        _check("prompt_tokens", self.prompt_tokens, 1, None)


def _check(key: str, value: float, low: float, high: float | None) -> None:
    if not (value >= low and (high is None or value <= high) and value < float("inf")):
        raise ConfigError(key, value, f"at least {low}" if high is None else f"{low} to {high}")
