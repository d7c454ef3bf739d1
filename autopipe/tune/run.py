"""`autopipe tune` without the terminal: profile, search, live check, report, within a budget."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autopipe.bench.workload import encode_workload, read_workload
from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.plan import Plan, StagePlan
from autopipe.core.preflight import inspect_plan
from autopipe.inputs import require_writable
from autopipe.profile import Profile
from autopipe.tune.budget import Budget
from autopipe.tune.candidates import too_large
from autopipe.tune.checking import check_plans
from autopipe.tune.context import Context, Progress
from autopipe.tune.decide import Decision
from autopipe.tune.objective import Objective, goals
from autopipe.tune.options import TuneOptions
from autopipe.tune.outcome import by_prediction, make_result, write_files
from autopipe.tune.power import measure_power
from autopipe.tune.predict import Predictor, plain_plan
from autopipe.tune.profiling import ProfileTimeError, cached_profile, chains
from autopipe.tune.result import TuneResult
from autopipe.tune.search import Callback
from autopipe.tune.searching import search_plans
from autopipe.tune.storage import import_optuna, open_storage

PHASES = ("profile", "search", "live", "report")
_NO_TIME = "time was up before the stages were measured; what was is kept, so call again or allow more"


def tune_plan(
    options: TuneOptions,
    *,
    callbacks: Sequence[Callback] = (),
    progress: Progress = lambda phase, label, share: None,
    say: Callable[[str], None] = lambda line: None,
) -> TuneResult:
    """Find the best plan for a target, a workload and this machine.

    Args:
        callbacks: called with the study and the trial, as Optuna's are, after every trial of the search that this
            process runs, not after those of other workers; one may call `study.stop()`, which ends this process's part.
        progress: told what is being done.
        say: told, in a line of text, when a download or a conversion begins.

    Raises:
        ConfigError: an option that is not allowed, before anything is loaded.
        AutoPipeError: the target cannot be loaded, or fails.
    """
    budget = Budget(options.budget_s)
    import_optuna()
    for path, key in ((options.out, "--out"), (options.report, "--report")):
        if path is not None:
            require_writable(path, key)
    storage = open_storage(options.storage)
    chosen = read_workload(options.workload, "--workload")
    plain = plain_plan(options.base)
    notes: list[str] = []
    info = inspect_plan(plain, progress=say)
    if info.max_length is not None and options.max_new_tokens >= info.max_length:
        allowed = f"2 to {info.max_length - 1}: the target's context holds {info.max_length} tokens, prompt included"
        raise ConfigError("--max-new-tokens", options.max_new_tokens, allowed)
    drafters = _those_that_fit(options, plain, notes)
    for plan in chains(options.base.target, drafters, options.base):
        inspect_plan(plan, progress=say)
    prompts = encode_workload(chosen, plain, say)
    context = Context(options, budget, plain, prompts, None, (), callbacks, progress, notes)
    with tempfile.TemporaryDirectory(prefix="autopipe-tune-") as scratch:
        with _phase(context, "profile"):
            _measure_power(context)
            context.goals = goals(options.objective, has_energy=context.power is not None)
            profile = _profile(context, drafters, info.eos_token_ids)
        if profile is None:
            result, traces = make_result(context, Decision(None, _NO_TIME)), {}
        else:
            predictor = Predictor(profile, context.power)
            with _phase(context, "search"):
                study, ranked, best = search_plans(context, storage, drafters, predictor)
            if options.check_live:
                with _phase(context, "live"):
                    plans = [*best, *ranked]
                    live = check_plans(context, storage, study.study_name, predictor, plans, Path(scratch))
                decision, traces = live.decision, live.traces
            else:
                live, decision, traces = None, by_prediction(context, predictor, ranked), {}
            result = make_result(context, decision, predictor=predictor, study=study, best=best, live=live)
        _note_overspent(context)
        with _phase(context, "report"):
            write_files(context, result, traces)
    return result


def _note_overspent(context: Context) -> None:
    over_s = context.budget.spent_s - context.budget.total_s
    if over_s > 1.0:
        context.notes.append(
            f"took {over_s:.0f} s more than the budget: what had begun, such as loading a model, was finished first"
        )


def _those_that_fit(options: TuneOptions, plain: Plan, notes: list[str]) -> list[StagePlan]:
    """Drafters that fit into memory beside the target, by the size of their files.

    Raises:
        ConfigError: the target alone does not fit.
    """
    problem = too_large(plain, options.limits)
    if problem is not None:
        raise ConfigError("--target", options.base.target.model, f"a model that fits: this one {problem}")
    fitting = []
    for stage in options.drafters:
        problem = too_large(Plan(chain=(stage, options.base.target)), options.limits)
        if problem is None:
            fitting.append(stage)
        else:
            notes.append(f"left out the drafter {stage.name}: with the target it {problem}")
    return fitting


def _profile(context: Context, drafters: list[StagePlan], eos: Sequence[int]) -> Profile | None:
    """The profile; drafters that fail are taken out of the list. None: time was up."""
    options = context.options
    while True:
        try:
            return cached_profile(
                options.base.target,
                drafters,
                context.prompts,
                base=options.base,
                workload=options.workload,
                eos_token_ids=eos,
                max_new_tokens=options.max_new_tokens,
                budget_s=options.budget_s,
                deadline_s=context.budget.profile_deadline_s(),
                fresh=options.fresh,
                advance=lambda label, share: context.progress("profile", label, share),
            )
        except ProfileTimeError:
            return None
        except ConfigError as error:
            key = "--workload" if error.key == "--prompts" else error.key  # a prompt that leaves no room for output
            raise ConfigError(key, error.value, error.allowed) from None
        except AutoPipeError as error:
            guilty = next((stage for stage in drafters if repr(stage.name) in str(error)), None)
            if guilty is None:
                raise
            drafters.remove(guilty)
            context.notes.append(f"left out the drafter {guilty.name}: {error}")


def _measure_power(context: Context) -> None:
    """Where energy matters and this machine tells it."""
    options = context.options
    limited = options.limits.j_per_token is not None
    if not limited and options.objective not in (Objective.ENERGY, Objective.PARETO):
        return
    context.progress("profile", "power", 0.0)
    context.power = measure_power(context.plain, context.prompts[0], context.budget.live_deadline_s())
    if context.power is None and limited:
        allowed = "no limit: this machine has no energy counter (see `autopipe doctor`)"
        raise ConfigError("--max-j-per-token", options.limits.j_per_token, allowed)
    if context.power is None and options.objective is Objective.PARETO:
        context.notes.append("energy is not a goal: this machine has no energy counter")


@contextmanager
def _phase(context: Context, name: str) -> Iterator[None]:
    started = time.monotonic()
    context.progress(name, "", 0.0)
    try:
        yield
    finally:
        context.phases_s[name] = round(time.monotonic() - started, 2)
    context.progress(name, "done", 1.0)
