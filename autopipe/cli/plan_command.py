"""`autopipe plan`: where stages go and how fast that will be, on this machine or on one you do not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopipe.cli import arguments as arg

if TYPE_CHECKING:
    from autopipe.cli.plan_forecast import Forecast

HELP = """Place a chain on devices, and predict how fast it will be.

The target is placed first; drafters get devices of their own while there are any; models take at most 80% of a
device's memory. What does not fit is explained in bytes.

With `--dry-run` nothing has to be there: neither the hardware nor the models. Latencies come from the hardware
file's measured curves, from `--profile`, or else from a roofline (memory bandwidth and arithmetic); what rests on
an estimate is marked so. An n-gram drafter is left out of the prediction, since what it brings depends on the text:
`autopipe profile` measures it, `autopipe tune` predicts and runs it.

Examples:

- `autopipe plan --dry-run --hardware 8xH100 --target llama-3.1-70b --drafter llama-3.2-1b --drafter llama-3.1-8b`
- `autopipe plan --dry-run --hardware 2x4090 --target qwen2.5-32b --target-dtype int4 --drafter qwen2.5-0.5b`
- `autopipe plan --dry-run --hardware pipespec-4xA100 --target llama-3.1-70b --target-dtype int4 \
--drafter llama-3.2-1b --drafter llama-3.1-8b` (the PipeSpec paper's system)
- `autopipe plan --dry-run --hardware mine.yaml --plan plan.yaml --agreement 0.8 --out placed.yaml`
- `autopipe plan --plan plan.yaml --measure-cores --out placed.yaml` (this machine, threads and cores by measuring)
"""

_HARDWARE = (
    "`8xH100`, `2x4090+1xA100-80GB`, `cpu` (this machine's), `pipespec-4xA100`, or a YAML file (docs/hardware.md)."
)


def plan(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Neither the hardware nor the models need to be there.")
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", metavar="WHAT", help=f"With --dry-run: {_HARDWARE} Default: this machine."),
    ] = None,
    plan: arg.PlanFile = None,
    target: arg.Target = None,
    drafter: arg.Drafters = None,
    target_dtype: Annotated[
        str | None,
        typer.Option(
            "--target-dtype",
            metavar="TYPE",
            help="`bf16`, `fp16`, `fp32`, `int8`, `int4`. Fewer bits change the output.",
        ),
    ] = None,
    drafter_dtype: Annotated[
        str | None, typer.Option("--drafter-dtype", metavar="TYPE", help="The same, of all drafters: the output stays.")
    ] = None,
    agreement: Annotated[
        list[float] | None,
        typer.Option(
            "--agreement",
            metavar="RATE",
            help="How often a drafter picks the target's token, 0 to 1. Once for each drafter, in their order. "
            "Default: of the hardware file or the profile, else 0.7.",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Measured latencies, from `autopipe profile`.")
    ] = None,
    context: Annotated[
        int, typer.Option("--context", metavar="N", help="Longest sequence in tokens, that caches must hold.")
    ] = 4096,
    share: Annotated[
        float, typer.Option("--memory-share", metavar="X", help="Most of a device's memory that models may take.")
    ] = 0.8,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", metavar="N", help="Tokens of the simulated output.")
    ] = 2000,
    rebalance: Annotated[
        bool,
        typer.Option("--rebalance/--no-rebalance", help="Move layers to a neighbour's device where that pays."),
    ] = True,
    measure_cores: Annotated[
        bool,
        typer.Option(
            "--measure-cores", help="On this machine: run the plan with every split of its cores, take the best."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the fastest plan, devices filled in (YAML).")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.cli.plan_forecast import PlanRequest, make_forecast
        from autopipe.core.errors import ConfigError
        from autopipe.inputs import require_writable

        if hardware is not None and not dry_run:
            raise ConfigError("--hardware", hardware, "only with --dry-run: a plan is for this machine otherwise")
        if measure_cores and dry_run:
            raise ConfigError("--measure-cores", True, "only without --dry-run: it runs the chain here")
        if out is not None:
            require_writable(out, "--out")
        result = make_forecast(
            PlanRequest(
                hardware=hardware,
                plan=plan,
                target=target,
                drafters=tuple(drafter or ()),
                target_dtype=target_dtype,
                drafter_dtype=drafter_dtype,
                agreement=tuple(agreement or ()),
                profile=profile,
                context=context,
                share=share,
                output_tokens=output_tokens,
                rebalance=rebalance,
            ),
            check_models=not dry_run,
        )
        best, data = result.best_plan(), result.as_dict()
        if measure_cores:
            from autopipe.cli.plan_cores import measure

            choice = measure(best)
            best = choice.plan
            data |= {"cores": {"chosen": choice.label, "ms_per_token": choice.ms_per_token}}
            data["plan"] = best.model_dump(mode="json", exclude_defaults=True)
        if out is not None:
            out.write_text(best.to_yaml(), encoding="utf-8")
        if json_output:
            print(json.dumps(data))
            return
        show(result)
        if measure_cores:
            from autopipe.cli.plan_cores import show_cores

            show_cores(choice)


def register(root: typer.Typer) -> None:
    """Add the command to the application."""
    root.command("plan", help=HELP)(plan)


def show(result: Forecast) -> None:
    """Tables of devices, stages and predictions on stdout."""
    from rich.table import Table

    from autopipe.cli.show import console
    from autopipe.core.placement import gigabytes

    placement, output = result.placement, console()
    table = Table("device", "kind", "memory", "may be used", "used", "by", title=placement.hardware.name)
    for device in placement.hardware.devices:
        takers = [
            f"{stage.name}: {gigabytes(use.total)}"
            for stage in placement.stages
            for name, use in stage.memory(placement.context).items()
            if name == device.name
        ]
        table.add_row(
            device.name,
            device.kind,
            gigabytes(device.memory_bytes),
            gigabytes(placement.budget(device)),
            gigabytes(placement.used(device)),
            ", ".join(takers) or "-",
        )
    output.print(table)

    table = Table("stage", "dtype", "where", "weights", "KV", "ms, 1 token", "ms, 8", "from")
    for stage in placement.stages:
        memory = stage.memory(placement.context).values()
        latency = placement.latency(stage)
        table.add_row(
            stage.name,
            stage.candidate.dtype.value,
            ", ".join(f"{part.device.name} ({part.num_layers} layers)" for part in stage.parts),
            gigabytes(sum(use.weights for use in memory)),
            gigabytes(sum(use.kv for use in memory)),
            f"{1e3 * latency.of(1):.1f}",
            f"{1e3 * latency.of(8):.1f}",
            latency.source,
        )
    output.print(table)

    table = Table("run", "ms/token", "tokens/s", "over plain", "tokens/verify", "settings", "rests on")
    for each in result.predictions:
        table.add_row(
            each.name,
            f"{each.ms_per_token:.1f}",
            f"{each.tokens_per_s:.1f}",
            f"{each.speedup_over_plain:.2f}x",
            f"{each.acceptance_length:.1f}",
            _settings(each),
            "estimates" if each.estimated else "measurements",
        )
    output.print(table)
    for note in (*placement.notes, *result.notes):
        output.print(f"note: {note}", markup=False)


def _settings(prediction: Any) -> str:
    settings = prediction.settings
    if not settings.windows:
        return "-"
    windows = "+".join(map(str, settings.windows))
    if prediction.mode.value != "async":
        return f"window {windows}"
    return f"window {windows}, min_drafts {settings.min_drafts}, {settings.when_short.value}"
