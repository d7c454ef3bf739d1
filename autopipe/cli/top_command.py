"""`autopipe top`: what the devices and the running pipelines are doing."""

from __future__ import annotations

from typing import Annotated

import typer

HELP = """Watch devices and running pipelines. Ctrl-C ends it.

Devices: load, memory, power, temperature, clocks, links; what a device does not tell is left out. GPUs are those
that CUDA_VISIBLE_DEVICES names. Pipelines: every one that you are running on this machine, in whatever process:
plan, tokens per second, and of each stage acceptance, drafts waiting and how busy it is.

Examples:

- `autopipe top`
- `autopipe top --once --json`
"""


def top(
    interval: Annotated[float, typer.Option("--interval", metavar="S", help="Seconds between two readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One reading, then leave.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object per reading and line.")] = False,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.core.errors import ConfigError
        from autopipe.core.telemetry.pipelines import running_pipelines
        from autopipe.core.telemetry.top import run_top

        if not 0.1 <= interval <= 3600:
            raise ConfigError("--interval", interval, "0.1 to 3600 seconds")
        run_top(pipelines=running_pipelines, interval_s=interval, once=once, as_json=json_output)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(name="top", help=HELP)(top)
