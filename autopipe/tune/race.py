"""The live check: the best few of the search against plain decoding, prompt by prompt.

Every measurement is a pair: a plan and plain decoding continue the same prompt right after each other, in the same
process, and only the ratio counts. So a slow minute of the machine hurts nobody. Successive halving first: all on a few
prompts, the better half on twice as many, and so on. The last few are measured on all prompts, the leader first; the
others are given up as soon as a Wilcoxon signed-rank test says that they are worse, unless only few requests count (the
slowest ones), of which no such test can tell.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from autopipe.core.errors import AutoPipeError
from autopipe.core.plan import Plan
from autopipe.profile import ProfilePrompt
from autopipe.tune.claims import ERROR, Heartbeat, sign, take_back_lost
from autopipe.tune.cost import Cost
from autopipe.tune.live import OutOfTimeError, Run, is_out_of_memory, models_of
from autopipe.tune.search import PLAN, Found

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

FINAL = 3
"""So many are left when halving ends."""
FIRST_PROMPTS = 3
P_WORSE = 0.05
LEAST_STEPS = 8
"""Measurements of a plan, at least, if time allows."""
_STARTUP_STEPS = 5
"""Measurements before the test may give a plan up."""


class Runner(Protocol):
    """What runs a plan on a prompt: `LiveBench`, or a test's."""

    def run(self, plan: Plan, prompt: ProfilePrompt) -> Run: ...


@dataclass(slots=True)
class Arm:
    """A plan in the race.

    Attributes:
        runs, plain_runs: by step, of the plan and of plain decoding right beside it (see `order_prompts`).
        failed: why it is out, in words; None while it is in.
        given_up: that others were better, in words. unfinished: time was up before it was measured to the end.
    """

    found: Found
    name: str
    trial: Trial | None = None
    runs: dict[int, Run] = field(default_factory=dict)
    plain_runs: dict[int, Run] = field(default_factory=dict)
    failed: str | None = None
    given_up: str | None = None
    unfinished: bool = False

    @property
    def plan(self) -> Plan:
        return self.found.plan

    def ratio(self, cost: Cost, prompts: Iterable[int] | None = None) -> float:
        """Cost over that of plain decoding, over all prompts measured, or over these; NaN where there are none."""
        places = list(self.runs if prompts is None else prompts)
        return cost.ratio([self.runs[place] for place in places], [self.plain_runs[place] for place in places])


@dataclass(frozen=True, slots=True)
class Standing:
    """What is told of a race while it runs: what is measured, and the share that is done, 0 to 1."""

    label: str
    share: float


def order_prompts(prompts: Sequence[ProfilePrompt]) -> list[int]:
    """Steps of a race, so that any first few of them are of all kinds alike.

    Step n is prompt n modulo their number: few prompts are measured several times, as no test can tell two plans
    apart by a handful of figures.
    """
    queues: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        queues.setdefault(prompt.kind, []).append(place)
    longest = max(map(len, queues.values()))
    once = [queue[turn] for turn in range(longest) for queue in queues.values() if turn < len(queue)]
    passes = math.ceil(LEAST_STEPS / len(once))
    return [place + turn * len(once) for turn in range(passes) for place in once]


def race(
    arms: Sequence[Arm],
    plain: Plan,
    prompts: Sequence[ProfilePrompt],
    runner: Runner,
    study: Study,
    *,
    cost: Cost,
    deadline_s: float = math.inf,
    advance: Callable[[Standing], None] = lambda standing: None,
) -> None:
    """Fill in the arms' runs.

    Args:
        plain: plain decoding. Beside an arm it runs with the arm's models loaded, idle.
        study: one value to minimize, with a `WilcoxonPruner`; gets a trial for plain decoding and for each arm.
        deadline_s: on the clock of `time.monotonic`; what is not measured by then is left.
    """
    _Race(list(arms), plain, prompts, runner, study, cost, deadline_s, advance).run()


class _Race:
    def __init__(
        self,
        arms: list[Arm],
        plain: Plan,
        prompts: Sequence[ProfilePrompt],
        runner: Runner,
        study: Study,
        cost: Cost,
        deadline_s: float,
        advance: Callable[[Standing], None],
    ) -> None:
        self._arms = arms
        self._plain = plain
        self._prompts = prompts
        self._runner = runner
        self._study = study
        self._cost = cost
        self._deadline_s = deadline_s
        self._advance = advance
        self._order = order_prompts(prompts)
        self._num_done = 0

    def run(self) -> None:
        self._add_plain_trial()
        with Heartbeat(self._study) as heartbeat:
            for arm in self._arms:
                arm.trial = self._new_trial(arm.found)
                heartbeat.watch(arm.trial)
            try:
                self._halve()
                self._finish()
            except OutOfTimeError:
                pass
            finally:
                self._tell_rest()

    # -- the two parts --------------------------------------------------------------------------------------

    def _halve(self) -> None:
        kinds = len({prompt.kind for prompt in self._prompts})
        count = min(len(self._order), max(FIRST_PROMPTS, kinds))
        while len(self._alive()) > FINAL:
            for group in self._groups():
                self._measure(group, self._order[:count])
            self._drop_the_worse()
            if count == len(self._order):
                break
            count = min(len(self._order), 2 * count)

    def _drop_the_worse(self) -> None:
        alive = sorted(self._alive(), key=self._so_far)
        for arm in alive[max(FINAL, math.ceil(len(alive) / 2)) :]:
            arm.given_up = f"others were better on {len(arm.runs)} prompts"

    def _finish(self) -> None:
        """Measure the last arms on all prompts, one after the other, the best so far first."""
        for arm in sorted(self._alive(), key=self._so_far):
            for place in self._order:
                if place not in arm.runs:
                    self._measure([arm], [place])
                if arm.failed is None and self._is_worse(arm):
                    arm.given_up = f"worse than the best on {len(arm.runs)} prompts (Wilcoxon, p < {P_WORSE})"
                if arm.failed or arm.given_up:
                    break
            self._tell(arm)

    def _so_far(self, arm: Arm) -> float:
        return arm.ratio(self._cost) if arm.runs else math.inf

    def _is_worse(self, arm: Arm) -> bool:
        enough = self._cost.by_run and len(arm.runs) >= _STARTUP_STEPS
        return enough and arm.trial is not None and arm.trial.should_prune()

    # -- measuring ------------------------------------------------------------------------------------------

    def _alive(self) -> list[Arm]:
        return [arm for arm in self._arms if arm.failed is None and arm.given_up is None]

    def _groups(self) -> list[list[Arm]]:
        """Arms with the same models: they are measured in turns, with plain decoding among them."""
        groups: dict[str, list[Arm]] = {}
        for arm in self._alive():
            groups.setdefault(models_of(arm.plan), []).append(arm)
        return list(groups.values())

    def _measure(self, group: Sequence[Arm], places: Sequence[int]) -> None:
        for place in places:
            missing = [arm for arm in group if arm.failed is None and place not in arm.runs]
            if not missing:
                continue
            try:
                plain = self._run(self._plain_beside(missing[0]), place, "plain")
            except AutoPipeError as error:  # its models do not load
                for arm in missing:
                    arm.failed = _reason(error)
                return
            for arm in missing:
                try:
                    found = self._run(arm.plan, place, arm.name)
                except AutoPipeError as error:
                    arm.failed = _reason(error)
                    continue
                self._take(arm, place, found, plain)

    def _take(self, arm: Arm, place: int, found: Run, plain: Run) -> None:
        if arm.plan.exact and found.token_ids != plain.token_ids:
            arm.failed = f"its output differs from plain decoding's on prompt {self.prompt(place).name}"
            return
        ratio = self._cost.ratio([found], [plain])
        if not math.isfinite(ratio) or ratio <= 0:
            arm.failed = f"its cost on prompt {self.prompt(place).name} is not a number"
            return
        arm.runs[place], arm.plain_runs[place] = found, plain
        if arm.trial is not None:
            arm.trial.report(ratio, place)

    def _run(self, plan: Plan, place: int, name: str) -> Run:
        if time.monotonic() >= self._deadline_s:
            raise OutOfTimeError
        self._advance(Standing(name, min(1.0, self._num_done / self._most_runs())))
        self._num_done += 1
        return self._runner.run(plan, self.prompt(place))

    def prompt(self, step: int) -> ProfilePrompt:
        return self._prompts[step % len(self._prompts)]

    def _plain_beside(self, arm: Arm) -> Plan:
        """Plain decoding with the arm's models loaded, so that both run in one engine."""
        return arm.plan.replace(mode=self._plain.mode, warmup={}, tuned=None)

    def _most_runs(self) -> int:
        """Runs of a race in which nobody is given up before the end; it may be shorter."""
        count, arms, total = FIRST_PROMPTS, len(self._arms), 0
        while arms > FINAL and count < len(self._order):
            total += count * (arms + 1)
            arms, count = max(FINAL, math.ceil(arms / 2)), 2 * count
        return max(1, total + 2 * min(FINAL, len(self._arms)) * len(self._order))

    # -- the study ------------------------------------------------------------------------------------------

    def _add_plain_trial(self) -> None:
        from optuna.trial import create_trial

        steps = dict.fromkeys(self._order, 1.0)
        attrs = {PLAN: self._plain.model_dump(mode="json", exclude_defaults=True), "name": "plain"}
        self._study.add_trial(create_trial(value=1.0, intermediate_values=steps, user_attrs=attrs))

    def _new_trial(self, found: Found) -> Trial:
        """A running trial with the parameters of the search's trial."""
        from optuna.trial import Trial, TrialState, create_trial

        template = create_trial(
            state=TrialState.RUNNING,
            params=found.trial.params,
            distributions=found.trial.distributions,
            user_attrs={PLAN: found.trial.user_attrs[PLAN], "search_trial": found.trial.number},
        )
        return sign(Trial(self._study, self._study._storage.create_new_trial(self._study._study_id, template)))

    def _tell(self, arm: Arm) -> None:
        from optuna.trial import TrialState

        trial, arm_value = arm.trial, arm.ratio(self._cost)
        if trial is None:
            return
        arm.trial = None
        reason = arm.failed or arm.given_up or ("time was up" if arm.unfinished else None)
        if reason is not None:
            trial.set_user_attr(ERROR if arm.failed else "given_up", reason)
        if arm.failed or not math.isfinite(arm_value):
            self._study.tell(trial, state=TrialState.FAIL)
        elif reason is not None:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, arm_value)

    def _tell_rest(self) -> None:
        for arm in self._arms:
            arm.unfinished = not (arm.failed or arm.given_up) and len(arm.runs) < len(self._order)
            self._tell(arm)


def _reason(error: AutoPipeError) -> str:
    return f"out of memory: {error}" if is_out_of_memory(error) else str(error)


def new_race_study(storage: Any, name: str) -> Study:
    """A study for one race, in the same storage: `NAME-live-1`, `-2`, ... by call."""
    import optuna

    number = 1
    while True:
        try:
            study = optuna.create_study(
                storage=storage,
                study_name=f"{name}-live-{number}",
                direction="minimize",
                pruner=optuna.pruners.WilcoxonPruner(p_threshold=P_WORSE, n_startup_steps=_STARTUP_STEPS),
            )
        except optuna.exceptions.DuplicatedStudyError:
            earlier = optuna.load_study(storage=storage, study_name=f"{name}-live-{number}")
            take_back_lost(earlier, retry=False)  # of a call that was killed
            number += 1
            continue
        study.set_metric_names(["cost over plain decoding's"])
        return study
