"""The last phase: what was found, and the files that say so."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.profile import ProfilePrompt
from autopipe.tune import decide
from autopipe.tune.checking import LiveCheck
from autopipe.tune.context import Context
from autopipe.tune.cost import SECONDS
from autopipe.tune.objective import cost
from autopipe.tune.pictures import draw
from autopipe.tune.plan_file import front_text, measured_figures, plain_figures, plan_text, tuned_plan, write_plan
from autopipe.tune.predict import Predictor
from autopipe.tune.race import Arm
from autopipe.tune.report import write_report
from autopipe.tune.result import Measured, TuneResult
from autopipe.tune.search import Found

if TYPE_CHECKING:
    from optuna import Study


_LEAST_GAIN = 0.03
"""A smaller predicted gain is taken for none: two measurements of one profile differ by that much."""


def by_prediction(context: Context, predictor: Predictor, ranked: Sequence[Found]) -> decide.Decision:
    """The decision of the simulator alone."""
    context.notes.append("not measured live: what is said of the plan's speed is a prediction")
    top = ranked[0] if ranked else None
    plain = predictor.predict(context.plain)
    gain = 0.0 if top is None else cost(context.goals, plain) / cost(context.goals, top.prediction)
    if top is None or gain < 1 + _LEAST_GAIN:
        reason = f"no simulated plan that keeps to the limits is over {_LEAST_GAIN:.0%} better than plain decoding"
        return decide.Decision(None, reason)
    reason = f"the best of {len(ranked)} simulated plans, predicted {gain:.2f} times {context.cost.words}"
    return decide.Decision(Arm(top, "plan 1"), reason)


def make_result(
    context: Context,
    decision: decide.Decision,
    *,
    predictor: Predictor | None = None,
    study: Study | None = None,
    best: Sequence[Found] = (),
    live: LiveCheck | None = None,
) -> TuneResult:
    """All that was found, as users get it.

    Args:
        predictor: None: the stages were not measured. best: the front.
    """
    options = context.options
    winner = decision.winner
    rows = [] if live is None else [_measured(context, arm, live.prompts, arm is winner) for arm in live.arms]
    rows.sort(key=lambda row: (row.verdict != "chosen", -(row.gain or 0.0)))
    plain = None if predictor is None else predictor.predict(context.plain)
    prediction = plain if winner is None else winner.found.prediction
    tuned = partial(tuned_plan, objective=options.objective.value, workload=options.workload, plain=plain)
    return TuneResult(
        plan=tuned(
            context.plain if winner is None else winner.plan,
            prediction=prediction,
            measured=_figures(rows, decision),
        ),
        helps=winner is not None,
        reason=decision.reason,
        objective=options.objective,
        prediction=prediction,
        plain_prediction=plain,
        measured=rows,
        front=[(tuned(found.plan, prediction=found.prediction), found.prediction) for found in best],
        study=study,
        live_study=None if live is None else live.study,
        profile=None if predictor is None else predictor.profile,
        phases_s=context.phases_s,
        notes=context.notes,
    )


def _figures(rows: Sequence[Measured], decision: decide.Decision) -> dict[str, float | None] | None:
    """What was measured of the chosen plan; None: nothing."""
    best = next((row for row in rows if decision.best is not None and row.name == decision.best.name), None)
    if decision.winner is not None:
        return None if best is None else measured_figures(best)
    beside = best or next((row for row in rows if row.plain_ms_per_token is not None), None)
    return None if beside is None else plain_figures(beside, best)


def _measured(context: Context, arm: Arm, prompts: Sequence[ProfilePrompt], is_winner: bool) -> Measured:
    tokens = sum(len(run.token_ids) for run in arm.runs.values() if run.acceptance_length)
    forwards = sum(len(run.token_ids) / run.acceptance_length for run in arm.runs.values() if run.acceptance_length)
    reason = arm.failed or arm.given_up or ("time was up" if arm.unfinished else "others were better")
    return Measured(
        name=arm.name,
        plan=arm.plan,
        prompts=len(arm.runs),
        ms_per_token=decide.ms_per_token(arm),
        plain_ms_per_token=decide.ms_per_token(arm, plain=True),
        slow_ms_per_token=decide.slow_ms_per_token(arm),
        plain_slow_ms_per_token=decide.slow_ms_per_token(arm, plain=True),
        speedup=1 / arm.ratio(SECONDS) if arm.runs else None,
        gain=1 / arm.ratio(context.cost) if arm.runs else None,
        by_kind=decide.by_kind(arm, prompts),
        p_better=decide.p_better(arm, context.cost),
        ttft_s=decide.ttft_s(arm),
        j_per_token=decide.j_per_token(arm),
        acceptance_length=tokens / forwards if forwards else None,
        verdict="chosen" if is_winner else reason,
        prediction=arm.found.prediction,
    )


def write_files(context: Context, result: TuneResult, traces: dict[str, Path]) -> None:
    """The plan, the plans of the front, the report and its pictures.

    Raises:
        ConfigError: a file cannot be written.
    """
    options = context.options
    if options.out is not None:
        write_plan(options.out, plan_text(result))
        result.files["plan"] = options.out
        for place, (plan, _) in enumerate(result.front, start=1):
            path = options.out.with_name(f"{options.out.stem}-front-{place}{options.out.suffix}")
            write_plan(path, front_text(plan, place))
            result.files[f"front-{place}"] = path
    if options.report is not None:
        context.progress("report", "pictures", 0.2)
        pictures = draw(result, context.goals, options.report.with_suffix(""), traces)
        write_report(options.report, result, context.goals, pictures)
        result.files |= {"report": options.report, **pictures}
