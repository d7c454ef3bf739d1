"""The bandit: every verified position scores every plan, through what it says of the drafters; the rest is explored.

Arms are the plans of `candidates`. An interval tells, of every drafter that is scored, how often it would have been
right (full information); from that and the stages' times follows what each arm would have yielded, played or not
(`Predictor`). What cannot be scored so, an adapter's agreement, an idle drafter's where the engine does not score
it, what a mode costs beyond the formulas, is explored: by UCB (an upper bound of the agreement, the more so the less is
known) or by Thompson sampling (a draw from the belief). The reward is goodput; a factor by chain and mode, learned from
goodput measured against goodput predicted, corrects the formulas. Everything fades, so drift is followed.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.menu import OFF, Action, slots_of
from autopipe.envs.observation import Observation
from autopipe.policies.base import Info, Policy, Reason, Situation, info_mask
from autopipe.policies.beliefs import Beliefs
from autopipe.policies.candidates import candidates
from autopipe.policies.live_profile import assumed_profile
from autopipe.policies.predict import Machine, Predictor

Floats = NDArray[np.float64]

_KNOWN_TOKENS = 64.0
"""Positions after which a drafter is no longer unknown."""
_TIE = 0.001
"""Plans whose predicted times differ by no more are as fast."""


class Exploration(StrEnum):
    UCB = "ucb"
    THOMPSON = "thompson"
    NONE = "none"


class BanditPolicy(Policy):
    """See the module.

    Args:
        exploration: how what is not known is tried.
        optimism: standard errors added to an agreement that is not known (UCB).
        min_gain: a plan replaces the one in force when it promises this much more, beside what switching costs.
        horizon_intervals: intervals over which a switch has to pay for itself.
    """

    name = "bandit"

    def __init__(
        self,
        exploration: Exploration = Exploration.UCB,
        *,
        optimism: float = 0.7,
        min_gain: float = 0.015,
        horizon_intervals: float = 24.0,
    ) -> None:
        self._exploration = Exploration(exploration)
        self._optimism, self._min_gain, self._horizon = optimism, min_gain, horizon_intervals

    def reset(self, situation: Situation, seed: int = 0) -> None:
        codec = situation.codec
        profile = situation.profile or assumed_profile(codec)
        self._codec = codec
        self._machine = Machine.of(profile, codec)
        self._plans = candidates(codec)
        self._predictor = Predictor(self._machine, self._plans)
        self._beliefs = Beliefs(situation, self._machine)
        self._rng = np.random.default_rng([seed, 7])
        self._interval_tokens = situation.config.interval_tokens
        self._ngram_window = (self._plans.member * self._plans.window)[self._machine.is_ngram].sum(axis=0)
        self._group = self._plans.actions[:, 0] * 2 + self._plans.is_async  # chain and mode
        self._group[0] = 0
        count = int(self._group.max()) + 2
        self._log_factor, self._weight = np.zeros(count), np.full(count, 4.0)
        self._action = codec.off()
        self._expected: tuple[int, float] | None = None
        self._reason = Reason("start with plain decoding")

    def act(self, observation: Observation, info: Info) -> Action:
        in_force = info.get("action_in_force", self._action)
        self._beliefs.update(info, in_force)
        predicted = self._predictor.seconds_per_token(self._explored(), self._beliefs.slow_down)
        self._learn_factor(info, in_force, predicted)
        allowed = self._plans.allowed(info_mask(info, self._codec))
        seconds = predicted * np.exp(self._log_factor / self._weight)[self._group]
        seconds[~allowed] = np.inf
        current = self._plans.index(self._action)
        chosen, gain = self._choose(seconds, 0 if current is None else current)
        self._reason = self._explained(chosen, gain, current)
        self._action = self._plans.actions[chosen].copy()
        return self._action

    def explain(self) -> Reason:
        return self._reason

    # -- parts ----------------------------------------------------------------------------------------------

    def _explored(self) -> Floats:
        """Agreement by adapter and slot, more hopeful where little is known."""
        agreement = self._beliefs.agreement()
        if self._exploration is Exploration.NONE:
            return agreement
        judged = self._beliefs.evidence()
        if self._exploration is Exploration.THOMPSON:
            return np.clip(self._rng.beta(agreement * judged + 0.5, (1 - agreement) * judged + 0.5), 0.005, 0.995)
        error = np.sqrt(agreement * (1 - agreement) / judged)
        unknown = np.clip(1 - self._beliefs.tokens_seen() / _KNOWN_TOKENS, 0.0, 1.0)
        hopeful: Floats = np.clip(agreement + self._optimism * error * unknown, 0.005, 0.995)
        return hopeful

    def _learn_factor(self, info: Info, action: Action, predicted: Floats) -> None:
        """Goodput measured against goodput predicted, by chain and mode."""
        tokens, seconds = int(info.get("decode_tokens", 0)), float(info.get("decode_s", 0.0))
        index = self._plans.index(action)
        if tokens < self._interval_tokens // 2 or seconds <= 0 or index is None or index == 0:
            return
        if not np.array_equal(action, self._action) or not self._is_known(action):
            return  # a plan that was still loading: the interval is part one, part the other
        if self._expected is None or self._expected[0] != index:
            self._expected = (index, 0.0)  # an interval in which a switch took place is not typical
            return
        error = float(np.clip(np.log(seconds / tokens / predicted[index]), -0.5, 0.7))
        group = int(self._group[index])
        self._log_factor[group] = 0.95 * self._log_factor[group] + error
        self._weight[group] = 0.95 * self._weight[group] + 1

    def _is_known(self, action: Action) -> bool:
        seen = self._beliefs.tokens_seen()
        return all(seen[: int(action[-1]) + 1, slot].max() >= _KNOWN_TOKENS for slot in slots_of(int(action[0])))

    def _choose(self, seconds: Floats, current: int) -> tuple[int, float]:
        """The plan that pays most over the horizon, what switching costs included; and its gain in goodput."""
        if not np.isfinite(seconds[current]):
            best = self._fastest(seconds)
            return best, float(seconds[0] / seconds[best] - 1)
        horizon_tokens = self._horizon * self._interval_tokens
        cost_s = self._switch_s(current)
        total = seconds + cost_s / horizon_tokens
        # What a plan that is still loading costs: nothing but its late coming, so a part of the gain is lost.
        best = self._fastest(total)
        gain = float(seconds[current] / total[best] - 1)
        if best == current or gain < self._min_gain:
            return current, 0.0
        return best, gain

    def _fastest(self, seconds: Floats) -> int:
        """The fastest plan; of those as fast, the one that leaves an n-gram drafter's gate the most room.

        The formulas know how often drafts are right, not when: to them all windows beyond what pays on average are
        alike. The gate knows when.
        """
        near = np.flatnonzero(seconds <= (1 + _TIE) * seconds.min())
        return int(near[np.argmax(self._ngram_window[near])])

    def _switch_s(self, current: int) -> Floats:
        """Seconds that going over to each plan costs, [n]."""
        here = self._plans.member[:, current]
        new = self._plans.member & ~here[:, None]  # [slots, n]
        other_adapter = (self._plans.adapter != self._plans.adapter[current]) & (self._plans.actions[:, 0] != OFF)
        new |= self._plans.member & other_adapter[None, :] & ~self._machine.is_ngram[:, None]
        cost: Floats = (new * self._machine.switch_s[:, None]).sum(axis=0)
        return cost

    def _explained(self, chosen: int, gain: float, current: int | None) -> Reason:
        agreement = self._beliefs.agreement()[0]
        shares = ", ".join(f"{name} {agreement[slot]:.2f}" for slot, name in enumerate(self._codec.slot_names()))
        text = f"on {self._beliefs.kind.value} text the drafters agree: {shares}"
        if current is not None and chosen == current:
            return Reason(f"{text}; no other plan promises enough more", 0.0)
        return Reason(f"{text}; {self._codec.describe(self._plans.actions[chosen])} promises {gain:+.0%}", gain)
