"""`autopipe drafts ngram`: learn an n-gram table from recorded answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from autopipe.drafts.ngram_making import Trial

_HELP = """Learn an n-gram table from recorded answers: drafts for microseconds, for any prompt.

The table is built from the training answers, and tuned and calibrated on held-out ones: longest context, counts and
confidence are those with the best expected speed. Benchmark sets play no part. Use it with

    chain:
      - {model: ngram, window: 11, ngram: {table: table.safetensors}}
      - {model: YOUR-TARGET}

Examples:

- `autopipe drafts ngram --answers answers --out table.safetensors`
- `autopipe drafts ngram --answers answers --out small.safetensors --max-mib 1`
"""


def ngram(
    answers: Annotated[
        Path, typer.Option("--answers", metavar="DIR", help="Folder made by `autopipe drafts answers`.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The table's file.")],
    max_mib: Annotated[float, typer.Option("--max-mib", metavar="MIB", help="Budget for the table.")] = 7.0,
    max_order: Annotated[
        int | None, typer.Option("--max-order", metavar="N", help="Longest context, 1 to 8. Default: chosen.")
    ] = None,
    min_count: Annotated[
        int | None, typer.Option("--min-count", metavar="N", help="Drop contexts seen less often. Default: chosen.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.cli.run_command import say
        from autopipe.core.errors import ConfigError
        from autopipe.drafts.ngram_making import make_table
        from autopipe.inputs import require_writable

        if not 0 < max_mib <= 1024:
            raise ConfigError("--max-mib", max_mib, "more than 0 and at most 1024")
        require_writable(out, "--out")
        max_bytes = int(max_mib * 2**20)
        trials = make_table(answers, out, max_bytes=max_bytes, max_order=max_order, min_count=min_count, say=say)
        if json_output:
            print(json.dumps([trial.to_dict() for trial in trials]))
        else:
            show(trials, out)


def register(app: typer.Typer) -> None:
    """Add the command to `autopipe drafts`."""
    app.command(name="ngram", help=_HELP)(ngram)


def show(trials: Sequence[Trial], out: Path) -> None:
    from rich.table import Table

    from autopipe.cli.show import console, number

    kinds = list(trials[0].speed)
    table = Table(title=f"{out}: expected speed over plain decoding, on held-out answers")
    for heading in ("", "longest context", "least count", "entries", *kinds):
        table.add_column(heading, justify="right")
    for index, trial in enumerate(trials):
        speeds = [number(trial.speed[kind].speedup if kind in trial.speed else None, unit="x") for kind in kinds]
        name = "written" if index == 0 else "trial"
        table.add_row(name, str(trial.max_order), str(trial.min_count), f"{trial.num_entries:,}", *speeds)
    output = console()
    output.print(table)
    output.print("`written`: the table's speed on held-out answers that had no part in choosing or calibrating it.")
