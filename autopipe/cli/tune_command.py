"""`autopipe tune`: the best plan for this machine, this model and this workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from autopipe.cli import arguments as arg

_SPACE = "What may be chosen"
_LIMITS = "Limits"
_STUDY = "Search"

HELP = """Find the fastest safe plan for this machine, this model and this workload, and show why.

Four phases: **profile** the stages (kept in the cache), **search** every plan over them in the simulator (Optuna),
**live**: check the best few against plain decoding on the same prompts, **report**. The plan goes to `plan.yaml`, which
`run`, `bench` and `serve` take as `--plan`; the pictures go beside `report.html`. Plain decoding is always a candidate:
where nothing helps, the plan says so. The output of every plan is that of plain decoding, token for token.

Examples:

- `autopipe tune --budget 5m` (the default model, code and chat prompts)
- `autopipe tune --target big --drafter small --drafter small,dtype=fp32 --workload mine.jsonl`
- `autopipe tune --objective pareto --max-ttft-ms 300 --memory-share 0.5`
- `autopipe tune --storage sqlite:///tune.db --study-name mine --trials 200 --workers 2`, again later to go on;
  `optuna-dashboard sqlite:///tune.db` shows it

Leave the machine alone meanwhile: anything else that computes falsifies the times.
"""


def tune(
    target: arg.Target = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            metavar="MODEL",
            rich_help_panel=_SPACE,
            help="A drafter that may be used: a model, or `MODEL,adapter=FOLDER,dtype=fp32,device=cuda:1`; or `int4` "
            "or `int8`, the target itself with its weights in fewer bits; repeat. An n-gram drafter always may, and by "
            "default `int4`, `int8` and one shipped for the target, if any; `none`: no other.",
        ),
    ] = None,
    table: Annotated[
        list[Path] | None,
        typer.Option(
            "--table",
            metavar="FILE",
            rich_help_panel=_SPACE,
            help="A learned n-gram table that may be used; repeat. Default: the one shipped for the target, if any.",
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            "--precision", metavar="TYPE", rich_help_panel=_SPACE, help="Try drafters in `bf16`, `fp32`, ...; repeat."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            rich_help_panel=_SPACE,
            help="A plan (YAML) whose target is tuned for and whose drafters may be used.",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            metavar="SET",
            help="Your prompts: a file of JSON lines, `humaneval[:N]`, `chat[:N]`, `summarize[:N]`; repeat for several "
            "kinds. Default: humaneval:12 and chat:12.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", help="Longest output per prompt.")
    ] = 128,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            metavar="GOAL",
            help="`throughput`; `latency`: of the slowest tenth of requests; `energy`: per token; `pareto`: goodput, "
            "first token, memory and energy at once, and all plans that none beats in everything.",
        ),
    ] = "throughput",
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="How long it may take: `90s`, `10m`, `1h30m`. Short of a minute it may be exceeded: a model that "
            "loads, or a measurement that has begun, is waited for.",
        ),
    ] = "10m",
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the plan goes.")] = Path("plan.yaml"),
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Where the report goes. Default: report.html beside the plan."),
    ] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report and no pictures.")] = False,
    memory_share: Annotated[
        float,
        typer.Option("--memory-share", metavar="X", rich_help_panel=_LIMITS, help="Of each device's memory, at most."),
    ] = 0.8,
    memory_limit: Annotated[
        list[str] | None,
        typer.Option(
            "--memory-limit",
            metavar="DEVICE=GIB",
            rich_help_panel=_LIMITS,
            help="Instead of that share, for one device: `cpu=4`, `cuda:0=20`; repeat.",
        ),
    ] = None,
    max_ms_per_token: Annotated[
        float | None,
        typer.Option("--max-ms-per-token", metavar="MS", rich_help_panel=_LIMITS, help="Latency target."),
    ] = None,
    max_ttft_ms: Annotated[
        float | None,
        typer.Option(
            "--max-ttft-ms", metavar="MS", rich_help_panel=_LIMITS, help="Mean time to the first token, at most."
        ),
    ] = None,
    max_j_per_token: Annotated[
        float | None,
        typer.Option(
            "--max-j-per-token", metavar="J", rich_help_panel=_LIMITS, help="Energy of the machine per token, at most."
        ),
    ] = None,
    exact: arg.Exact = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            metavar="N",
            rich_help_panel=_STUDY,
            help="Exactly so many more trials of the simulated search, all workers together; 0: those that earlier "
            "calls left. Default: as many as its share of the time allows.",
        ),
    ] = None,
    sampler: Annotated[
        str,
        typer.Option("--sampler", metavar="NAME", rich_help_panel=_STUDY, help="`tpe`, `gp`, `nsga2`, `random`."),
    ] = "tpe",
    seed: Annotated[int, typer.Option("--seed", metavar="N", rich_help_panel=_STUDY, help="Of the sampler.")] = 0,
    workers: Annotated[
        int,
        typer.Option("--workers", metavar="N", rich_help_panel=_STUDY, help="Processes that search; needs --storage."),
    ] = 1,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="URL",
            rich_help_panel=_STUDY,
            help="Where the studies are kept: `sqlite:///tune.db`, another database, `journal:///tune.log`. "
            "Default: nowhere.",
        ),
    ] = None,
    study_name: Annotated[
        str | None,
        typer.Option(
            "--study-name",
            metavar="NAME",
            rich_help_panel=_STUDY,
            help="A study that is there is gone on with. Default: a name made from what is tuned.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure the profile anew instead of taking it from the cache.")
    ] = False,
    no_live: Annotated[bool, typer.Option("--no-live", help="Skip the live check: believe the simulator.")] = False,
    trust_remote_code: arg.TrustRemoteCode = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.core.errors import ConfigError
        from autopipe.tune.options import DEFAULT_WORKLOAD, REPORT_NAME, TuneOptions
        from autopipe.tune.run import tune_plan

        if plan is not None and out.exists() and plan.exists() and out.samefile(plan):
            raise ConfigError("--out", str(out), "another file than --plan, which would be overwritten")
        base = base_plan(plan, target, exact, trust_remote_code)
        options = TuneOptions.make(
            base,
            drafters=drafter,
            tables=table,
            precisions=precision or (),
            workload=tuple(workload or DEFAULT_WORKLOAD),
            max_new_tokens=max_new_tokens,
            objective=objective,
            budget=budget,
            memory_share=memory_share,
            memory_limits=parse_memory_limits(memory_limit or ()),
            max_ms_per_token=max_ms_per_token,
            max_ttft_ms=max_ttft_ms,
            max_j_per_token=max_j_per_token,
            num_trials=trials,
            sampler=sampler,
            seed=seed,
            workers=workers,
            storage=storage,
            study_name=study_name,
            fresh=fresh,
            check_live=not no_live,
            out=out,
            report=None if no_report else report or out.with_name(REPORT_NAME),
        )
        from autopipe.cli.run_command import say
        from autopipe.cli.tune_show import progress, show

        with progress() as tell:
            result = tune_plan(options, progress=tell, say=say)
        if json_output:
            print(json.dumps(result.to_dict()))
        else:
            show(result)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(name="tune", help=HELP)(tune)


def base_plan(plan: Path | None, target: str | None, exact: bool | None, trust_remote_code: bool) -> Any:
    """What is tuned for: the target of a plan's file, or a model; by default the default plan.

    Raises:
        ConfigError: no such plan or model.
    """
    from autopipe.cli.options import PlanOptions, build_plan

    return build_plan(PlanOptions(plan=plan, target=target, exact=exact, trust_remote_code=trust_remote_code))


def parse_memory_limits(texts: Any) -> dict[str, int]:
    """Bytes by device of `cpu=4` (GiB).

    Raises:
        ConfigError: not like that.
    """
    from autopipe.core.errors import ConfigError

    found: dict[str, int] = {}
    for text in texts:
        device, _, number = text.partition("=")
        try:
            gib = float(number)
        except ValueError:
            gib = 0.0
        if not device or not 0 < gib < float("inf"):
            raise ConfigError("--memory-limit", text, "DEVICE=GIB, such as cpu=4 or cuda:0=20")
        found[device] = int(gib * 2**30)
    return found
