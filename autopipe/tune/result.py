"""What `autopipe tune` found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.plan import Plan
from autopipe.profile import Profile
from autopipe.tune.objective import Objective
from autopipe.tune.predict import Prediction

if TYPE_CHECKING:
    from optuna import Study


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan that was measured live, and how it compares with plain decoding of the same prompts, at the same time.

    Attributes:
        slow_ms_per_token: of the request at the 90th percentile.
        speedup: how many times as fast. by_kind: the same for each kind of prompt.
        gain: how many times as good by the objective; that is the speedup, unless it is latency or energy.
        p_better: chance of such a gain if there were none (see `autopipe.tune.cost`).
        verdict: `chosen`, or why it was not.
        prediction: what the simulator said.
    """

    name: str
    plan: Plan
    prompts: int
    ms_per_token: float | None
    plain_ms_per_token: float | None
    slow_ms_per_token: float | None
    plain_slow_ms_per_token: float | None
    speedup: float | None
    gain: float | None
    by_kind: Mapping[str, float]
    p_better: float
    ttft_s: float | None
    j_per_token: float | None
    acceptance_length: float | None
    verdict: str
    prediction: Prediction

    def to_dict(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__slots__}
        return {
            **data,
            "plan": self.plan.model_dump(mode="json", exclude_defaults=True),
            "by_kind": dict(self.by_kind),
            "prediction": self.prediction.to_dict(),
        }


@dataclass(slots=True)
class TuneResult:
    """The outcome of `autopipe.tune`.

    Attributes:
        plan: the chosen plan, with its `tuned` section; plain decoding where nothing helps.
        helps: whether it is better than plain decoding beyond noise.
        reason: why it was chosen, in words.
        prediction, plain_prediction: simulated figures of it and of plain decoding; None without a profile.
        measured: the plans of the live check, the best first.
        front: with objective `pareto`, the plans that none beats in all goals.
        study: the simulated search; live_study: the live check. None where time was up before.
        profile: None where time was up before it was whole.
        phases_s: seconds by phase. notes: what did not go as planned, or is worth knowing.
        files: what was written, by what it is (`plan`, `report`, pictures).
    """

    plan: Plan
    helps: bool
    reason: str
    objective: Objective
    prediction: Prediction | None = None
    plain_prediction: Prediction | None = None
    measured: list[Measured] = field(default_factory=list)
    front: list[tuple[Plan, Prediction]] = field(default_factory=list)
    study: Study | None = None
    live_study: Study | None = None
    profile: Profile | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: dict[str, Path] = field(default_factory=dict)

    @property
    def winner(self) -> Measured | None:
        """The measured figures of the chosen plan; None if it is plain decoding."""
        return next((each for each in self.measured if each.verdict == "chosen"), None)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as plain decoding the chosen plan measured; 1 for plain decoding itself."""
        return self.winner.speedup if self.winner is not None else None if self.helps else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The object that `autopipe tune --json` prints."""
        return {
            "plan": self.plan.model_dump(mode="json", exclude_defaults=True),
            "helps": self.helps,
            "reason": self.reason,
            "objective": self.objective.value,
            "speedup": self.speedup,
            "prediction": None if self.prediction is None else self.prediction.to_dict(),
            "plain_prediction": None if self.plain_prediction is None else self.plain_prediction.to_dict(),
            "measured": [each.to_dict() for each in self.measured],
            "front": [
                {"plan": plan.model_dump(mode="json", exclude_defaults=True), "prediction": found.to_dict()}
                for plan, found in self.front
            ],
            "study": None if self.study is None else self.study.study_name,
            "live_study": None if self.live_study is None else self.live_study.study_name,
            "trials": {} if self.study is None else count_states(self.study),
            "phases_s": self.phases_s,
            "notes": self.notes,
            "files": {name: str(path) for name, path in self.files.items()},
        }


def count_states(study: Study) -> dict[str, int]:
    """Trials of a study by state: `complete`, `pruned`, `fail`, `running`, `waiting`."""
    counts: dict[str, int] = {}
    for trial in study.get_trials(deepcopy=False):
        name = trial.state.name.lower()
        counts[name] = counts.get(name, 0) + 1
    return counts
