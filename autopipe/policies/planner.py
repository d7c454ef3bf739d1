"""The planner: a living profile, and Optuna in the simulator whenever the world has changed.

What the engine sees keeps the profile current (`Beliefs`: agreement by kind of text, times of the stages). Where it has
moved away from what the plan in force was chosen for, a search begins in a process of its own (`Searcher`); until it is
done, and on kinds of text never met before, closed formulas fill in (`Predictor`). The plan found is adopted when its
predicted gain exceeds a threshold, and is then judged by what it measures: one that does not hold what it promised is
taken back, and its chain is believed less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.menu import OFF, Action, slots_of
from autopipe.envs.observation import Observation
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.scenario import PipelineModel
from autopipe.policies.base import Info, Policy, Reason, Situation, info_mask
from autopipe.policies.beliefs import Beliefs
from autopipe.policies.candidates import candidates
from autopipe.policies.live_profile import assumed_profile
from autopipe.policies.plan_search import SearchProblem, SearchResult
from autopipe.policies.predict import Machine, Predictor
from autopipe.policies.searcher import ProcessSearcher, Searcher

_START_PLANS = 6
_JUDGE_INTERVALS = 3
_MOST_PENALTY = 0.5


@dataclass(slots=True)
class _Known:
    """The plan for a kind of text, and what was believed when it was chosen."""

    action: Action
    agreement: NDArray[np.float64]
    slow_down: NDArray[np.float64]
    searched: bool


@dataclass(slots=True)
class _Trial:
    """A plan on probation: what was measured before it, what it promised, what it has measured."""

    before: Action
    kind: PromptKind
    before_s: float
    promised_s: float
    seconds: float = 0.0
    tokens: int = 0
    intervals: int = 0


class PlannerPolicy(Policy):
    """See the module.

    Args:
        searcher: who searches; None: a process of its own.
        min_gain: a plan is adopted when it promises this much more.
        drift: change of an agreement, in shares, after which a search begins; times count by three times as much.
    """

    name = "planner"

    def __init__(self, searcher: Searcher | None = None, *, min_gain: float = 0.02, drift: float = 0.06) -> None:
        self._searcher = searcher or ProcessSearcher()
        self._min_gain, self._drift = min_gain, drift

    def reset(self, situation: Situation, seed: int = 0) -> None:
        codec = situation.codec
        self._codec, self._seed = codec, seed
        self._profile = situation.profile or assumed_profile(codec)
        self._machine = Machine.of(self._profile, codec)
        self._plans = candidates(codec)
        self._predictor = Predictor(self._machine, self._plans)
        self._beliefs = Beliefs(situation, self._machine)
        self._known: dict[PromptKind, _Known] = {}
        self._penalty = np.zeros(codec.sizes[0])  # by chain: log of how much slower than promised it was
        self._asked: tuple[PromptKind, _Known] | None = None
        self._trial: _Trial | None = None
        self._measured_s = 0.0  # seconds per token of the last interval
        self._action = codec.off()
        self._num_searches = 0
        self._reason = Reason("start with plain decoding")
        self._searcher.prepare(self._problem(self._beliefs.kind, self._action, (OFF,)))

    def act(self, observation: Observation, info: Info) -> Action:
        in_force = info.get("action_in_force", self._action)
        self._beliefs.update(info, in_force)
        tokens, seconds = int(info.get("decode_tokens", 0)), float(info.get("decode_s", 0.0))
        self._measured_s = seconds / tokens if tokens else 0.0
        self._reason = Reason("the plan still fits what is known")
        taken_back = self._judge(tokens, seconds, in_force)
        result = self._searcher.poll(seconds)
        if result is not None and not taken_back:
            self._take(result)
        kind, allowed = self._beliefs.kind, self._plans.allowed(info_mask(info, self._codec))
        known = self._known.get(kind)
        chains = self._plans.actions[allowed, 0]
        if known is None or known.action[0] not in chains:
            known = self._guess(kind, allowed)
        if self._has_moved(kind, known) and not self._searcher.busy:
            self._ask(kind, known, sorted({int(chain) for chain in chains}))
        if not np.array_equal(known.action, self._action):
            self._change(known.action)
        return self._action

    def explain(self) -> Reason:
        return self._reason

    @property
    def disturbs(self) -> bool:
        return self._searcher.disturbs

    def close(self) -> None:
        self._searcher.close()

    # -- knowing --------------------------------------------------------------------------------------------

    def _guess(self, kind: PromptKind, allowed: NDArray[np.bool_]) -> _Known:
        """The best plan by the closed formulas."""
        seconds = self._predictor.seconds_per_token(self._beliefs.agreement(kind), self._beliefs.slow_down)
        seconds = np.where(allowed, seconds * np.exp(self._penalty[self._plans.actions[:, 0]]), np.inf)
        known = self._snapshot(kind, self._plans.actions[int(np.argmin(seconds))].copy(), searched=False)
        self._known[kind] = known
        self._reason = Reason(f"no plan searched for {kind.value} text yet: the best by the formulas")
        return known

    def _snapshot(self, kind: PromptKind, action: Action, *, searched: bool) -> _Known:
        return _Known(action, self._beliefs.agreement(kind).copy(), self._beliefs.slow_down.copy(), searched)

    def _has_moved(self, kind: PromptKind, known: _Known) -> bool:
        """Whether what is believed has moved away from what the plan was chosen for."""
        if not known.searched:
            return True
        moved = np.abs(self._beliefs.agreement(kind) - known.agreement).max()
        slower = np.abs(np.log(self._beliefs.slow_down / known.slow_down)).max()
        return bool(moved > self._drift or slower > 3 * self._drift)

    # -- searching ------------------------------------------------------------------------------------------

    def _ask(self, kind: PromptKind, known: _Known, chains: list[int]) -> None:
        seconds = self._predictor.seconds_per_token(self._beliefs.agreement(kind), self._beliefs.slow_down)
        seconds[~np.isin(self._plans.actions[:, 0], chains)] = np.inf
        order = np.argsort(seconds)
        start, seen = list[tuple[int, ...]](), set[tuple[int, int]]()
        for index in order:  # the best plan of each of the best chains
            group = (int(self._plans.actions[index, 0]), int(self._plans.is_async[index]))
            if np.isfinite(seconds[index]) and group not in seen and len(start) < _START_PLANS:
                seen.add(group)
                start.append(tuple(int(n) for n in self._plans.actions[index]))
        self._num_searches += 1
        self._asked = (kind, self._snapshot(kind, known.action, searched=True))
        self._searcher.ask(self._problem(kind, known.action, chains, start))

    def _problem(
        self, kind: PromptKind, current: Action, chains: Sequence[int], start: Sequence[tuple[int, ...]] = ()
    ) -> SearchProblem:
        return SearchProblem(
            pipeline=self._believed(kind),
            spaces=self._codec.spaces,
            kind=kind,
            chains=tuple(chains),
            adapters=tuple(range(1 + len(self._codec.menu.adapters))),
            current=tuple(int(n) for n in current),
            start=tuple(start),
            seed=self._seed % 1_000_000 + self._num_searches,
        )

    def _believed(self, kind: PromptKind) -> PipelineModel:
        """The profile as it is now."""
        agreement, slow_down = self._beliefs.agreement(kind), self._beliefs.slow_down
        names = self._codec.menu.adapters
        drafters = []
        for slot, drafter in enumerate(self._profile.drafters):
            factor = float(slow_down[slot])
            drafters.append(
                drafter.model_copy(
                    update={
                        "ms": {rows: ms * factor for rows, ms in drafter.ms.items()},
                        "agreement": {PromptKind.OTHER: float(agreement[0, slot]), kind: float(agreement[0, slot])},
                        "adapters": {
                            name: {
                                PromptKind.OTHER: float(agreement[1 + names.index(name), slot]),
                                kind: float(agreement[1 + names.index(name), slot]),
                            }
                            for name in drafter.adapters
                            if name in names
                        },
                        "load_ms": 0.0,
                    }
                )
            )
        target = self._profile.target
        slower = float(slow_down[-1])
        target = target.model_copy(update={"ms": {rows: ms * slower for rows, ms in target.ms.items()}})
        return self._profile.model_copy(update={"target": target, "drafters": tuple(drafters)})

    def _take(self, result: SearchResult) -> None:
        """Take over what a search has found, if it promises enough."""
        if self._asked is None:
            return
        (kind, snapshot), self._asked = self._asked, None
        found = self._codec.canonical(result.action)
        penalty = self._penalty[found[0]] - self._penalty[snapshot.action[0]]
        gain = (1 + result.gain) * float(np.exp(-penalty)) - 1
        known = self._known.get(kind)
        if known is not None and not np.array_equal(known.action, snapshot.action):
            snapshot.action = known.action  # taken back or guessed anew meanwhile
            self._known[kind] = snapshot
            return
        if gain > self._min_gain:
            snapshot.action = found
            self._reason = Reason(
                f"a search of {result.tried} plans in the simulator found {self._codec.describe(found)}: {gain:+.0%}",
                gain,
            )
        self._known[kind] = snapshot

    # -- adopting and judging -------------------------------------------------------------------------------

    def _change(self, action: Action) -> None:
        predicted = self._predicted(action)
        before = self._predicted(self._action)
        gain = before / predicted - 1 if predicted > 0 else None
        if self._reason.predicted_gain is None:
            self._reason = Reason(self._reason.text, gain)
        if self._measured_s > 0 and predicted > 0:
            self._trial = _Trial(self._action, self._beliefs.kind, self._measured_s, predicted)
        self._action = action

    def _predicted(self, action: Action) -> float:
        """Seconds per token of a plan by the formulas; 0 for one that is not among the candidates."""
        index = self._plans.index(action)
        if index is None:
            return 0.0
        seconds = self._predictor.seconds_per_token(self._beliefs.agreement(), self._beliefs.slow_down)
        return float(seconds[index] * np.exp(self._penalty[action[0]]))

    def _judge(self, tokens: int, seconds: float, in_force: Action) -> bool:
        """Compare a new plan with what it promised; take it back when it fell short of it and of the one before."""
        trial = self._trial
        if trial is None or not np.array_equal(in_force, self._action) or self._searcher.disturbs:
            return False
        if self._beliefs.kind is not trial.kind:
            self._trial = None
            return False
        trial.intervals += 1
        if trial.intervals > 1:  # the first one has the switch in it
            trial.seconds, trial.tokens = trial.seconds + seconds, trial.tokens + tokens
        if trial.intervals <= _JUDGE_INTERVALS or not trial.tokens:
            return False
        self._trial = None
        measured_s = trial.seconds / trial.tokens
        shortfall = float(np.log(measured_s / trial.promised_s))
        if self._action[0] != OFF:
            learned = self._penalty[self._action[0]] + 0.5 * shortfall
            self._penalty[self._action[0]] = float(np.clip(learned, -_MOST_PENALTY, _MOST_PENALTY))
        if shortfall < 0.08 or measured_s < 1.02 * trial.before_s or slots_of(int(trial.before[0])) == []:
            return False
        known = self._known.get(trial.kind)
        if known is not None:
            self._known[trial.kind] = self._snapshot(trial.kind, trial.before, searched=True)
            self._reason = Reason(f"{self._codec.describe(self._action)} did not hold what it promised", -shortfall)
        return True
