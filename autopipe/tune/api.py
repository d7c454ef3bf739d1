"""The Python API: `autopipe.tune(...)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autopipe.core.plan import Mode, Plan, StagePlan
from autopipe.tune.context import Progress
from autopipe.tune.options import TuneOptions
from autopipe.tune.result import TuneResult
from autopipe.tune.run import tune_plan
from autopipe.tune.search import Callback


def tune(
    target: str | Plan | Path,
    drafters: Sequence[str | StagePlan] | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    progress: Progress = lambda phase, label, share: None,
    say: Callable[[str], None] = lambda line: None,
    out: str | Path | None = None,
    report: str | Path | None = None,
    **options: Any,
) -> TuneResult:
    """Find the best plan for a target, a workload and this machine.

    Args:
        target: a model as `AutoPipe.from_pretrained` takes it; or a plan, or its file, whose target is tuned for and
            whose drafters may be used.
        drafters: more drafters that may be used: models, `MODEL,adapter=FOLDER,dtype=fp32`, or stages.
        callbacks: called as `callback(study, trial)`, like Optuna's, after every trial of the search that this process
            runs: with `workers` above 1 not after those of the others. `study.stop()` ends this process's part only.
        progress: told the phase (`profile`, `search`, `live`, `report`), what is done, and the share that is done.
        say: told, in a line of text, when a download or a conversion begins.
        out, report: files to write; None: none.
        options: as `TuneOptions.make` takes them: workload, objective, budget, num_trials, storage, study_name,
            sampler, seed, workers, tables, precisions, memory_share, max_ms_per_token, max_ttft_ms, max_j_per_token,
            max_new_tokens, fresh, check_live.

    Returns:
        The plan, how it compares, and both studies.

    Raises:
        ConfigError: an option that is not allowed, before anything is loaded.
        AutoPipeError: the target cannot be loaded, or fails.
    """
    if isinstance(target, Plan):
        base = target
    elif isinstance(target, Path) or target.lower().endswith((".yaml", ".yml")):
        base = Plan.load(target)
    else:
        base = Plan(chain=(StagePlan.parse({"model": target}),), mode=Mode.PLAIN)
    made = TuneOptions.make(
        base,
        drafters=drafters,
        out=None if out is None else Path(out),
        report=None if report is None else Path(report),
        **options,
    )
    return tune_plan(made, callbacks=callbacks, progress=progress, say=say)
