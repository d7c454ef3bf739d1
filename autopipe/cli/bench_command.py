"""`autopipe bench`: build the arms, run them, show the rows."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autopipe.bench.arms import Arm, EnginePool, PipelineArm
from autopipe.bench.encode import encode_prompt, load_tokenizer
from autopipe.bench.machine import describe_machine
from autopipe.bench.prompts import Prompt, load_prompts
from autopipe.bench.report import Row
from autopipe.bench.runner import prepare_arms, run_bench
from autopipe.bench.specs import TRANSFORMERS_ARMS, ArmSpec, arm_settings, parse_arms
from autopipe.cli.options import NO_DRAFTER, PlanOptions, build_plan, naming_options, require_context
from autopipe.cli.run_command import open_pipe, say
from autopipe.core.affinity import usable_cores
from autopipe.core.errors import ConfigError
from autopipe.core.plan import Mode, Plan
from autopipe.core.sampling import SamplingParams

if TYPE_CHECKING:
    from autopipe.api import AutoPipe
    from autopipe.bench.precision import OutputChange
    from autopipe.core.telemetry import Sampler


def bench(
    *,
    prompts: str,
    compare: str,
    repeat: int,
    options: PlanOptions,
    sampling: SamplingParams,
    json_output: bool,
    telemetry: bool = True,
) -> None:
    """Measure the arms of `compare` on a prompt set; print a table, or one JSON object.

    Raises:
        ConfigError: a bad option, before anything is loaded.
    """
    if repeat < 1:
        raise ConfigError("--repeat", repeat, "1 or more")
    specs = parse_arms(compare)
    prompt_set = load_prompts(prompts)
    threads = options.threads if options.threads is not None else usable_cores()
    base = build_plan(options)
    plans = arm_plans(specs, options, threads)
    with (
        sampling_devices(telemetry) as sampler,
        bench_session(specs, plans, base, threads, options, sampling, telemetry) as (arms, encode),
    ):
        ids = [encode(prompt) for prompt in prompt_set]
        ready, missing = prepare_arms(arms)
        for name, reason in missing.items():
            print(f"{name}: missing: {reason}", file=sys.stderr)
        if not ready:
            raise ConfigError("--compare", compare, "at least one arm that can run here")
        with progress(len(ids) * repeat * len(ready)) as advance:
            measured = {
                row.name: row
                for row in run_bench(ready, ids, sampling, repeat=repeat, advance=advance, sampler=sampler)
            }
    rows = [measured.get(spec.label, Row(spec.label)) for spec in specs]
    changes = output_changes([plan for label, plan in plans.items() if label in measured], ids, threads, sampling)
    if json_output:
        machine = {**describe_machine(), "threads": threads, "missing": missing}
        plan = base.model_dump(mode="json", exclude_none=True)
        result: dict[str, Any] = {"rows": [row.to_dict() for row in rows], "machine": machine, "plan": plan}
        if changes:
            result["output_changes"] = [change.to_dict() for change in changes]
        print(json.dumps(result))
    else:
        from autopipe.cli import show

        show.bench_rows(rows, missing)
        for change in changes:
            show.console().print(change.sentence(), markup=False)


def output_changes(
    plans: Sequence[Plan], prompts: Sequence[Sequence[int]], threads: int, sampling: SamplingParams
) -> list[OutputChange]:
    """What quantising does to the output of each quantised target among `plans`."""
    from autopipe.bench.precision import measure_change
    from autopipe.core.plan import FEWER_BITS

    targets = {repr(plan.target.identity()): plan.target for plan in plans if plan.target.dtype in FEWER_BITS}
    return [
        measure_change(target, prompts, threads=threads, max_new_tokens=sampling.max_new_tokens, advance=say)
        for target in targets.values()
    ]


@contextmanager
def sampling_devices(wanted: bool) -> Iterator[Sampler | None]:
    """The process's sampler, where it is wanted."""
    if not wanted:
        yield None
        return
    from autopipe.core.telemetry import SamplerLease

    lease = SamplerLease()
    try:
        yield lease.sampler
    finally:
        lease.close()


@contextmanager
def bench_session(
    specs: Sequence[ArmSpec],
    plans: dict[str, Plan],
    base: Plan,
    threads: int,
    options: PlanOptions,
    sampling: SamplingParams,
    telemetry: bool = True,
) -> Iterator[tuple[list[Arm], Callable[[Prompt], list[int]]]]:
    """Arms, not loaded yet, and a function that turns a prompt into ids the same way for all of them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from autopipe.bench.library_arms import LlamaCppArm, OpenVinoArm
    from autopipe.bench.transformers_arms import TransformersArm, TransformersModels

    def open_named(plan: Plan) -> AutoPipe:
        with naming_options(options, plan):
            return open_pipe(plan, check=lambda info: require_context(info, sampling), telemetry=telemetry)

    pool = EnginePool(open_named)
    models = TransformersModels(threads)
    drafter = next((stage for stage in reversed(base.drafters) if not stage.is_ngram), None)
    arms: list[Arm] = []
    for spec in specs:
        if spec.is_pipeline:
            arms.append(PipelineArm(spec.label, plans[spec.label], pool))
        elif spec.kind in TRANSFORMERS_ARMS:
            arms.append(TransformersArm(spec.kind, base.target, models, drafter))
        elif spec.kind == "llama.cpp":
            arms.append(LlamaCppArm(base.target, threads))
        else:
            arms.append(OpenVinoArm(base.target, threads))

    tokenizer: list[Any] = []

    def encode(prompt: Prompt) -> list[int]:
        if not tokenizer:
            with naming_options(options, base):
                tokenizer.append(load_tokenizer(base, progress=say))
        if base.target.is_emulated and prompt.messages is not None:
            prompt = Prompt(prompt.name, text="\n".join(message["content"] for message in prompt.messages))
        return encode_prompt(prompt, tokenizer[0])

    try:
        yield arms, encode
    finally:
        for arm in arms:
            arm.close()
        models.close()
        pool.close()


def arm_plans(specs: Sequence[ArmSpec], options: PlanOptions, threads: int) -> dict[str, Plan]:
    """The plan of each pipeline arm, by its label.

    Raises:
        ConfigError: an option or an arm's setting is not allowed.
    """
    return {spec.label: _plan(spec, options, threads) for spec in specs if spec.is_pipeline}


def _plan(spec: ArmSpec, options: PlanOptions, threads: int) -> Plan:
    """The plan of a pipeline arm. Every arm gets the same threads; stages that run at once share them."""
    settings = arm_settings(spec)
    if tuple(settings.get("drafters", ())) == (NO_DRAFTER,):
        options = dataclasses.replace(options, windows=(), min_drafts=None)  # meant for the arms that have drafters
    plan = build_plan(dataclasses.replace(options, **settings))
    if options.threads is not None:
        return plan
    neural = sum(not stage.is_ngram for stage in plan.chain)
    share = max(1, threads // neural) if plan.mode is Mode.ASYNC else threads
    chain = [
        stage if stage.is_ngram or stage.threads is not None else stage.replace(threads=share) for stage in plan.chain
    ]
    return plan.replace(chain=chain)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr; it stands still while nobody watches (stderr is no terminal)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("warming up", total=total)
        done = -1

        def advance(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=name)

        yield advance
