"""From control intervals to observations: running averages, scaled to bounded numbers.

Every figure lies in [0, 1], so a policy needs no statistics of the machine it was trained for; what has never been
measured reads 0 and raises its missing flag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.config import EnvConfig
from autopipe.envs.interval import Interval
from autopipe.envs.menu import Action, ActionCodec, action_sizes
from autopipe.envs.prompt_kinds import PromptKind

Observation = dict[str, NDArray[np.float32]]

TELEMETRY = ("utilisation", "memory", "power", "temperature", "throttled")
MAX_STEP_MS = 1e4
MIN_STEP_MS = 1e-2
MAX_GOODPUT = 4.0
MAX_CONTEXT = 1 << 17
MAX_QUEUE = 63
_KINDS = tuple(PromptKind)
_KIND_INDEX = {kind: index for index, kind in enumerate(_KINDS)}


def observation_sizes(config: EnvConfig) -> dict[str, int]:
    """Length of every part of the observation, by name, in order; the table is in `PipelineEnv`."""
    slots = config.spaces.drafter_slots
    return {
        "acceptance_fast": slots,
        "acceptance_slow": slots,
        "acceptance_missing": slots,
        "step_time": slots,
        "step_time_missing": slots,
        "target_step": 2,
        "window_fill": slots,
        "rollback_rate": slots,
        "goodput": 2,
        "position": 1,
        "context_length": 1,
        "queue": 1,
        "plan": int(sum(action_sizes(config.spaces))),
        "telemetry": len(TELEMETRY),
        "telemetry_missing": len(TELEMETRY),
        "prompt_kind": len(_KINDS),
    }


class Observer:
    """Keeps the averages of one episode, and writes observations.

    Args:
        codec: of the actions.
        step_s: seconds of a single-token step by slot, the target's last, where known beforehand; None: not known.
            Float [slots + 1].
        verify_ratio: the target's forward of eight tokens relative to one.
    """

    def __init__(
        self, config: EnvConfig, codec: ActionCodec, step_s: Sequence[float | None], verify_ratio: float
    ) -> None:
        slots = config.spaces.drafter_slots
        self._codec = codec
        self._keep = 0.5 ** (1 / np.array([config.fast_intervals, config.slow_intervals]))  # [2]: fast, slow
        self._accepted = np.zeros((2, slots))  # discounted counts
        self._proposed = np.zeros((2, slots))
        self._goodput = np.ones(2)
        self._fill = np.zeros(slots)
        self._rollbacks = np.zeros(slots)
        self._step_s = np.array([math.nan if known is None else known for known in step_s])
        self._verify_ratio = verify_ratio
        ends = np.cumsum(list(observation_sizes(config).values())).tolist()
        starts = [0, *ends[:-1]]
        self._parts = dict(zip(observation_sizes(config), zip(starts, ends, strict=True), strict=True))
        self._length = ends[-1]

    def update(self, interval: Interval) -> None:
        """Take an interval into the averages. What was not used in it keeps its last figures."""
        figures = interval.slots
        decay = np.where(figures.proposed > 0, self._keep[:, None], 1.0)  # [2, slots]
        self._accepted = decay * self._accepted + figures.accepted
        self._proposed = decay * self._proposed + figures.proposed
        goodput = interval.relative_goodput
        if goodput is not None:
            self._goodput += (1 - self._keep) * (goodput - self._goodput)
        fast = 1 - self._keep[0]
        share = figures.proposed / np.maximum(figures.room, 1.0)
        self._fill += np.where(figures.room > 0, fast, 0.0) * (np.minimum(share, 1.0) - self._fill)
        rolled = figures.rollbacks / max(interval.num_tokens, 1)
        self._rollbacks += fast * (np.minimum(rolled, 1.0) - self._rollbacks)
        old = np.where(np.isnan(self._step_s), figures.step_s, self._step_s)
        self._step_s = np.where(figures.step_s > 0, old + fast * (figures.step_s - old), self._step_s)

    @property
    def acceptance(self) -> NDArray[np.float64]:
        """Acceptance rate by slot, fast and slow averages, float64 [2, slots]; NaN where nothing was proposed yet."""
        rate: NDArray[np.float64] = np.full(self._proposed.shape, np.nan)
        np.divide(self._accepted, self._proposed, out=rate, where=self._proposed > 0)
        return rate

    def observe(self, interval: Interval, action: Action) -> Observation:
        """The observation after an interval, with `action` in force."""
        rate, steps = self.acceptance, self._step_s
        missing = np.isnan(rate[0])
        no_step = np.isnan(steps[:-1])
        target_s = 1.0 if math.isnan(steps[-1]) else max(float(steps[-1]), 1e-9)
        parts: dict[str, Any] = {
            "acceptance_fast": np.where(missing, 0.0, rate[0]),
            "acceptance_slow": np.where(missing, 0.0, rate[1]),
            "acceptance_missing": missing,
            "step_time": np.where(no_step, 0.0, np.minimum(steps[:-1] / target_s, 1.0)),
            "step_time_missing": no_step,
            "target_step": (_scaled_ms(1e3 * target_s), _log_share(self._verify_ratio - 1, 15)),
            "window_fill": self._fill,
            "rollback_rate": self._rollbacks,
            "goodput": np.minimum(self._goodput / MAX_GOODPUT, 1.0),
            "position": (min(interval.position / interval.max_new_tokens, 1.0),),
            "context_length": (_log_share(interval.context_tokens, MAX_CONTEXT),),
            "queue": (_log_share(interval.queue, MAX_QUEUE),),
            "plan": self._codec.one_hot(action),
            "prompt_kind": _kind_row(interval.kind),
        }
        device = interval.device
        temperature = None if device.temperature_c is None else device.temperature_c / 100
        figures = (device.utilisation, device.memory, device.power, temperature, device.throttled)
        parts["telemetry"] = [0.0 if figure is None else min(max(figure, 0.0), 1.0) for figure in figures]
        parts["telemetry_missing"] = [figure is None for figure in figures]
        flat = np.empty(self._length, dtype=np.float32)
        observation: Observation = {}
        for name, (start, end) in self._parts.items():
            flat[start:end] = parts[name]
            observation[name] = flat[start:end]
        return observation


def _kind_row(kind: PromptKind) -> list[float]:
    row = [0.0] * len(_KINDS)
    row[_KIND_INDEX[kind]] = 1.0
    return row


def _log_share(value: float, largest: float) -> float:
    """0 for 0, 1 for `largest` and above, logarithmic in between."""
    return min(math.log1p(max(value, 0.0)) / math.log1p(largest), 1.0)


def _scaled_ms(milliseconds: float) -> float:
    """0 for `MIN_STEP_MS` and below, 1 for `MAX_STEP_MS` and above, logarithmic in between."""
    share = math.log(max(milliseconds, MIN_STEP_MS) / MIN_STEP_MS) / math.log(MAX_STEP_MS / MIN_STEP_MS)
    return min(share, 1.0)
