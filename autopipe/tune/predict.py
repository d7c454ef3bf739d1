"""What a plan would do, simulated from a profile: speed, waiting, memory, energy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from autopipe.core.chain import default_threads, neural_stages
from autopipe.core.plan import Mode, NgramOptions, Plan
from autopipe.envs.simulator import SimResult, simulate
from autopipe.profile import Profile, sim_chain, sim_requests
from autopipe.profile.model import NgramReplay
from autopipe.profile.ngram_replay import replay
from autopipe.profile.sim import find_stage

SLOW_SHARE = 0.9
"""The objective `latency` looks at the request at this quantile of milliseconds per token."""


@dataclass(frozen=True, slots=True)
class PowerModel:
    """What the whole machine draws: `idle_w`, and `core_w` more for every core that computes."""

    idle_w: float
    core_w: float

    def energy_j(self, total_s: float, core_s: float) -> float:
        return self.idle_w * total_s + self.core_w * core_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """Simulated figures of a plan on the profiled requests.

    Attributes:
        ms_per_token: over all requests, prefill included. tokens_per_s: its inverse, goodput.
        slow_ms_per_token: of the request at the 90th percentile. ttft_s: mean seconds to the first token.
        acceptance_length: tokens per verification.
        memory_bytes: by device. j_per_token: None where the machine has no energy counter.
    """

    ms_per_token: float
    tokens_per_s: float
    slow_ms_per_token: float
    ttft_s: float
    acceptance_length: float
    memory_bytes: dict[str, int]
    j_per_token: float | None

    @property
    def total_memory_bytes(self) -> int:
        return sum(self.memory_bytes.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Predictor:
    """Simulates plans over a profile's stages; n-gram replays, which take long, are kept.

    Args:
        power: None: energy is not predicted.
    """

    def __init__(self, profile: Profile, power: PowerModel | None = None) -> None:
        self.profile = profile
        self._power = power
        self._requests = sim_requests(profile)
        self._replays: dict[str, NgramReplay] = {_replay_key(profile.ngram.options): profile.ngram}
        self._known: dict[str, Prediction] = {}
        self._longest = max(len(each.prompt_ids) + len(each.output_ids) for each in profile.prompts)

    def predict(self, plan: Plan) -> Prediction:
        """Simulate a plan; the same plan again costs nothing.

        Raises:
            ConfigError: a stage that was not profiled.
        """
        key = plan.model_dump_json(exclude={"tuned"})
        if key not in self._known:
            self._known[key] = self._predict(plan)
        return self._known[key]

    def memory_bytes(self, plan: Plan) -> dict[str, int]:
        """Memory of the plan's stages by device, with caches as long as the longest request.

        Each process counts as it was measured alone, so pages that stages share count more than once: an upper bound.
        """
        found: dict[str, int] = {}
        for stage in neural_stages(plan):
            measured = find_stage(self.profile, stage, "chain")
            memory = measured.memory
            cache = self._longest * (memory.kv_bytes_per_token or 0)
            found["cpu"] = found.get("cpu", 0) + memory.resident_bytes
            if measured.device in ("", "cpu"):
                found["cpu"] += cache
            else:
                on_device = memory.device_bytes if memory.device_bytes is not None else memory.weight_bytes or 0
                found[measured.device] = found.get(measured.device, 0) + on_device + cache
        return found

    def _predict(self, plan: Plan) -> Prediction:
        profile = self._with_replay(plan)
        result = simulate(sim_chain(profile, plan), self._requests)
        core_s = self._core_seconds(plan, result)
        energy = None if self._power is None else self._power.energy_j(result.total_s, core_s) / result.tokens
        return Prediction(
            ms_per_token=result.ms_per_token,
            tokens_per_s=result.tokens / result.total_s,
            slow_ms_per_token=float(np.quantile(self._per_request(result), SLOW_SHARE)),
            ttft_s=result.ttft_s,
            acceptance_length=result.acceptance_length,
            memory_bytes=self.memory_bytes(plan),
            j_per_token=energy,
        )

    def _with_replay(self, plan: Plan) -> Profile:
        """The profile, with the offers of the plan's own n-gram drafter."""
        stage = plan.chain[0]
        if not stage.is_ngram:
            return self.profile
        options = stage.ngram_options()
        key = _replay_key(options)
        if key not in self._replays:
            self._replays[key] = replay(options, self.profile.prompts)
        recorded = self._replays[key]
        return self.profile.model_copy(update={"ngram": recorded.model_copy(update={"options": options})})

    def _per_request(self, result: SimResult) -> list[float]:
        """Milliseconds per token of every request."""
        found, started_s, first = [], 0.0, 0
        for request in self._requests:
            first += request.output_tokens
            ended_s = float(result.emitted_s[first - 1])
            found.append(1e3 * (ended_s - started_s) / request.output_tokens)
            started_s = ended_s
        return found

    def _core_seconds(self, plan: Plan, result: SimResult) -> float:
        """Seconds of computing, times cores that compute."""
        threads = {
            name: stage.threads or default_threads(plan)
            for name, stage in zip(plan.names(), plan.chain, strict=True)
            if not stage.is_ngram
        }
        return sum(stage.busy_s * threads.get(stage.name, 0) for stage in result.stages)


def plain_plan(plan: Plan) -> Plan:
    """The target of `plan` alone."""
    return plan.replace(chain=[plan.target], mode=Mode.PLAIN, warmup={}, tuned=None)


def _replay_key(options: NgramOptions) -> str:
    return options.model_copy(update={"gate": True}).model_dump_json()
