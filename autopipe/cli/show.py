"""Tables for people. Results go to stdout, everything about them to stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from autopipe.bench.report import Row

if TYPE_CHECKING:
    from autopipe.api import GenerationResult

_UNKNOWN = "-"
_WIDTH_WITHOUT_TERMINAL = 120


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure, or a dash for one that is not known."""
    return _UNKNOWN if value is None else f"{value:.{digits}f}{unit}"


def console(stderr: bool = False) -> Console:
    """A console that does not cut tables in files and pipes down to 80 columns."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL)


def summary(result: GenerationResult) -> None:
    """One line about a request on stderr, and what did not go as planned."""
    stats = result.stats
    parts = [
        f"{len(result.token_ids)} tokens ({result.finish_reason})",
        f"{number(stats.ms_per_token)} ms/token",
        f"{number(stats.acceptance_length)} tokens per verification",
        f"first token after {number(stats.ttft_s)} s",
    ]
    if stats.energy is not None and stats.energy.total_j_per_token is not None:
        parts.append(f"{number(stats.energy.total_j_per_token)} J/token")
    print(" · ".join(parts), file=sys.stderr)
    for fallback in stats.fallbacks:
        print(f"note: {fallback}", file=sys.stderr)


def stages(result: GenerationResult) -> None:
    """What each stage did, on stderr."""
    table = Table(title="Stages, cheapest first")
    headings = ("stage", "forwards", "proposed", "accepted", "rate", "roll-backs", "busy s", "waiting s")
    for heading in (*headings, "bytes/token", "saved"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage in result.stats.stages:
        table.add_row(
            stage.name,
            str(stage.forwards),
            str(stage.proposed),
            str(stage.accepted),
            number(stage.acceptance_rate),
            str(stage.rollbacks),
            number(stage.busy_s),
            number(stage.waiting_s),
            number(stage.bytes_per_token, 0),
            _UNKNOWN if stage.bytes_saved is None else f"{stage.bytes_saved:.0%}",
        )
    console(stderr=True).print(table)


def bench_rows(rows: Sequence[Row], missing: Mapping[str, str]) -> None:
    """The rows of a bench on stdout, and what is to be said about them."""
    table = Table()
    headings = [
        "arm",
        "tokens/s",
        "over plain",
        "median",
        "over transformers",
        "ms/token",
        "range",
        "tokens/verify",
        "identical",
    ]
    with_energy = any(row.j_per_token is not None for row in rows)
    if with_energy:
        headings.append("J/token")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "arm" else "right", overflow="fold")
    for row in rows:
        identical = _UNKNOWN if row.identical is None else f"{row.identical}/{row.prompts}"
        table.add_row(
            row.name,
            "missing" if row.name in missing else number(row.tokens_per_s, 1),
            number(row.speedup_over_plain, unit="x"),
            number(row.median_speedup, unit="x"),
            number(row.speedup_over_transformers, unit="x"),
            number(row.ms_per_token),
            f"{number(row.ms_per_token_min, 1)} to {number(row.ms_per_token_max, 1)}",
            number(row.acceptance_length),
            identical,
            *([number(row.j_per_token)] if with_energy else []),
        )
    output = console()
    output.print(table)
    for row in rows:
        if row.first_difference is not None:
            where = row.first_difference
            output.print(
                f"{row.name}: first differs from plain in prompt {where.prompt} at token {where.position}, "
                f"where the two best logits are {number(where.gap, 4)} apart"
            )
    for name, reason in missing.items():
        output.print(f"{name}: {reason}", markup=False)
    output.print(
        "tokens/s: of all prompts together, prefill included; `over` compares it. median: over prompts, of plain's "
        "time per token over the arm's. ms/token: median over prompts; range: fastest to slowest."
    )
