"""The oracle: the best plan for each segment, by full information. In simulation only; what others are measured by."""

from __future__ import annotations

import numpy as np

from autopipe.core.errors import ConfigError
from autopipe.envs.menu import Action
from autopipe.envs.observation import Observation
from autopipe.envs.pipeline_sim import PipelineSimEnv
from autopipe.policies.base import Info, Policy, Reason, Situation, info_mask
from autopipe.policies.candidates import candidates
from autopipe.policies.predict import Machine, Predictor
from autopipe.policies.truth import true_state

SEGMENT_INTERVALS = 6
SHORTLIST = 10


class OraclePolicy(Policy):
    """Every few intervals it tries out the most promising plans on a copy of the simulated machine, the text to come
    included, and takes the best; what switching costs is part of what it sees.

    Args:
        env: the environment that it acts in; it has to be reset already when the policy is.
        segment_intervals: intervals that it looks ahead, and between two decisions.
        shortlist: plans tried, chosen by `Predictor` with the true conditions; 0: all of them.
    """

    name = "oracle"

    def __init__(
        self, env: PipelineSimEnv, *, segment_intervals: int = SEGMENT_INTERVALS, shortlist: int = SHORTLIST
    ) -> None:
        if segment_intervals < 1:
            raise ConfigError("segment_intervals", segment_intervals, "at least 1")
        self._env, self._segment, self._most = env, segment_intervals, shortlist

    def reset(self, situation: Situation, seed: int = 0) -> None:
        self._codec = situation.codec
        self._plans = candidates(situation.codec)
        machine = Machine.of(self._env.world.scenario.pipeline, situation.codec)
        self._predictor = Predictor(machine, self._plans)
        self._action = situation.codec.off()
        self._left = 0
        self._gain = 0.0

    def act(self, observation: Observation, info: Info) -> Action:
        mask = info_mask(info, self._codec)
        current = self._plans.index(self._action)
        self._left -= 1
        if self._left > 0 and current is not None and self._plans.allowed(mask)[current]:
            return self._action
        self._left = self._segment
        shortlist = self._shortlist(info, current)
        goodputs = [self._env.forecast(self._plans.actions[index], self._segment) for index in shortlist]
        best = shortlist[int(np.argmax(goodputs))]
        kept = goodputs[shortlist.index(current)] if current in shortlist else 1.0
        self._gain = max(goodputs) / kept - 1
        self._action = self._plans.actions[best].copy()
        return self._action

    def explain(self) -> Reason:
        return Reason("the best of what was tried out on the text to come", self._gain)

    def _shortlist(self, info: Info, current: int | None) -> list[int]:
        allowed = self._plans.allowed(info_mask(info, self._codec))
        if not self._most:
            return [int(index) for index in np.flatnonzero(allowed)]
        world = self._env.world
        seconds = self._predictor.seconds_per_token(*true_state(world, self._codec), world.conditions.contention)
        seconds[~allowed] = np.inf
        best = [int(index) for index in np.argsort(seconds)[: self._most] if allowed[index]]
        extra = [0] if current is None or not allowed[current] else [0, current]
        return list(dict.fromkeys([*best, *extra]))
