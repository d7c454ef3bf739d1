"""`autopipe simulate`: what a plan would do, without running it; `simulate fit`: predict published runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

HELP = """Simulate a plan, and plain decoding of the same requests.

With `--profile` (from `autopipe profile`) stages take their measured times, and drafts are right exactly where
they were right on your prompts. A plan of `emulated` stages needs no profile.

Examples:

- `autopipe simulate --profile profile.json --plan plan.yaml`
- `autopipe simulate --profile profile.json --plan plan.yaml --kind code --json`
- `autopipe simulate --plan emulated.yaml --output-tokens 1000`
- `autopipe simulate fit traces.jsonl.gz --fit-on lookahead=2,8 --json`
"""

_FIT_HELP = """Fit the simulator to some published PipeSpec runs and predict the others.

TRACES is a `.jsonl` or `.jsonl.gz` with one run a line. A filter is KEY=V1,V2 with KEY `strategy`, `lookahead`
or `models`; several must all match. Runs of plain decoding (`greedy`) always belong to the fit; what is fitted
is never predicted. Only runs of two models can be simulated; others are named, and left out.

Examples:

- `autopipe simulate fit traces.jsonl.gz` (each run from all the others)
- `autopipe simulate fit traces.jsonl.gz --fit-on lookahead=2,8 --predict strategy=async-chain --json`
"""

app = typer.Typer(no_args_is_help=True, invoke_without_command=True, rich_markup_mode="markdown")


@app.callback(help=HELP)
def simulate(
    context: typer.Context,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="The plan (YAML) to simulate.")] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Measured stages, from `autopipe profile`.")
    ] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only the profile's prompts of this kind; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of agreement that is a rate.")] = 0,
    requests: Annotated[
        int, typer.Option("--requests", metavar="N", help="Without a profile: requests, one after another.")
    ] = 1,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", help="Without a profile: tokens of a prompt.")
    ] = 64,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", metavar="N", help="Without a profile: tokens of an output.")
    ] = 512,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.core.errors import ConfigError
        from autopipe.core.plan import Plan

        if plan is None:
            raise ConfigError("--plan", None, "the YAML file of a plan")
        loaded = Plan.load(plan)
        if profile is not None:
            from autopipe.profile import Profile, simulate_plan

            result = simulate_plan(Profile.load(profile), loaded, kinds, seed=seed)
        else:
            if kinds:
                raise ConfigError("--kind", kinds, "only with --profile")
            counts = {"--requests": requests, "--prompt-tokens": prompt_tokens, "--output-tokens": output_tokens}
            for key, count in counts.items():
                if count < 1:
                    raise ConfigError(key, count, "1 or more")
            if not loaded.target.is_emulated:
                raise ConfigError("--profile", None, "a profile of these models (see `autopipe profile`)")
            from autopipe.envs.simulator import simulate_command

            result = simulate_command(
                loaded, num_requests=requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens, seed=seed
            )
        if json_output:
            print(json.dumps(result))
        else:
            show(result)


@app.command(help=_FIT_HELP)
def fit(
    traces: Annotated[Path, typer.Argument(metavar="TRACES", help="Published runs.")],
    fit_on: Annotated[
        list[str] | None, typer.Option("--fit-on", metavar="FILTER", help="Runs to fit on; repeatable.")
    ] = None,
    predict: Annotated[
        list[str] | None, typer.Option("--predict", metavar="FILTER", help="Runs to predict; repeatable.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.envs.simulator import fit_command

        report = fit_command(traces, fit_on or (), predict or ())
        if json_output:
            print(json.dumps(report))
        else:
            show_fit(report)


def register(root: typer.Typer) -> None:
    """Add the commands to the application."""
    root.add_typer(app, name="simulate", help=HELP)


def show(result: dict[str, Any]) -> None:
    """A table of both runs on stdout."""
    from rich.table import Table

    from autopipe.cli.show import console, number

    table = Table()
    for heading in ("run", "ms/token", "first token s", "tokens/verify", "tokens", "total s"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for name in ("plan", "plain"):
        run = result[name]
        table.add_row(
            name,
            number(run["ms_per_token"]),
            number(run["ttft_s"], 3),
            number(run["acceptance_length"]),
            str(run["tokens"]),
            number(run["total_s"]),
        )
    output = console()
    output.print(table)
    for stage in result["plan"]["stages"]:
        rate = "" if stage["acceptance_rate"] is None else f", accepts {stage['acceptance_rate']:.3f} of its drafts"
        output.print(f"{stage['name']}: {stage['forwards']} forwards, busy {stage['busy_s']:.2f} s{rate}", markup=False)
    output.print(f"{result['speedup']:.2f} times as fast as plain decoding. ms/token includes the prefill.")


def show_fit(report: dict[str, Any]) -> None:
    """A table of predictions on stdout."""
    from rich.table import Table

    from autopipe.cli.show import console

    table = Table("strategy", "models", "lookahead", "measured ms/token", "predicted", "error")
    for each in report["predictions"]:
        table.add_row(
            each["strategy"],
            " + ".join(each["models"]),
            str(each["lookahead"]),
            f"{each['measured_ms_per_token']:.1f}",
            f"{each['predicted_ms_per_token']:.1f}",
            f"{each['error']:+.1%}",
        )
    output = console()
    output.print(table)
    output.print(
        f"{len(report['predictions'])} predictions from {len(report['fitted'])} runs; absolute error: median "
        f"{report['median_error']:.1%}, worst {report['worst_error']:.1%}"
    )
    if report["left_out"]:
        output.print(
            f"left out (only runs of two models can be simulated): {', '.join(report['left_out'])}", markup=False
        )
