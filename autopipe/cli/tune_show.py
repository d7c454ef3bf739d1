"""What `autopipe tune` shows: how far it is, and what it has found."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopipe.tune import TuneResult
    from autopipe.tune.context import Progress

_EVERY_S = 10.0


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar for each phase on stderr; where that is no terminal, a line for each thing begun and then every 10 s."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from autopipe.tune.run import PHASES

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {name: bars.add_task(name, total=1.0, start=False, doing="") for name in PHASES}
        lines = _Lines()

        def tell(phase: str, label: str, share: float) -> None:
            if not bars.tasks[list(tasks).index(phase)].started:
                bars.start_task(tasks[phase])
            bars.update(tasks[phase], completed=share, doing=label)
            if not console.is_terminal and (line := lines.next(phase, label, share)) is not None:
                print(line, file=sys.stderr, flush=True)

        yield tell


class _Lines:
    """Chooses what to print of the progress where there is no terminal."""

    def __init__(self) -> None:
        self._last, self._phase = "", ""
        self._began_s = self._said_s = 0.0

    def next(self, phase: str, label: str, share: float) -> str | None:
        """A line when something begins; every 10 s how far the phase is, and how long it may still take."""
        now_s = time.monotonic()
        text = phase if not label or phase in ("search", "live") else f"{phase}: {label}"
        if phase != self._phase:
            self._phase, self._began_s = phase, now_s
        begins, self._last = text != self._last, text
        if not begins and now_s - self._said_s < _EVERY_S:
            return None
        self._said_s, spent_s = now_s, now_s - self._began_s
        if begins or not share:
            return text
        return f"{text}: {share:.0%}, about {spent_s * (1 - share) / share:.0f} s left"


def show(result: TuneResult) -> None:
    """What was found, on stdout."""
    from rich.table import Table

    from autopipe.cli.show import console, number
    from autopipe.tune.result import count_states
    from autopipe.tune.space import structure

    output = console()
    if result.measured:
        table = Table(title="Live check: each plan beside plain decoding, on the same prompts")
        for heading in (
            "plan",
            "chain",
            "windows",
            "predicted ms/token",
            "measured",
            "over plain",
            "by kind",
            "verdict",
        ):
            table.add_column(heading, justify="left" if heading in ("plan", "chain", "verdict") else "right")
        for each in result.measured:
            table.add_row(
                each.name,
                structure(each.plan),
                ", ".join(str(stage.window) for stage in each.plan.drafters),
                number(each.prediction.ms_per_token),
                number(each.ms_per_token),
                number(each.speedup, unit="x"),
                ", ".join(f"{kind} {gain:.2f}x" for kind, gain in each.by_kind.items()),
                each.verdict,
            )
        output.print(table)
    if result.front:
        table = Table(title="Front: plans that none beats in everything (predicted)")
        for heading in ("chain", "windows", "tokens/s", "first token ms", "memory MiB", "J/token"):
            table.add_column(heading, justify="left" if heading == "chain" else "right")
        for plan, found in result.front:
            table.add_row(
                structure(plan),
                ", ".join(str(stage.window) for stage in plan.drafters) or "-",
                number(found.tokens_per_s, 1),
                number(1e3 * found.ttft_s, 0),
                number(found.total_memory_bytes / 2**20, 0),
                number(found.j_per_token),
            )
        output.print(table)
    output.print(f"{structure(result.plan)}: {result.reason}.", markup=False)
    for note in result.notes:
        output.print(f"note: {note}", markup=False)
    if result.study is not None:
        counts = ", ".join(f"{count} {state}" for state, count in count_states(result.study).items())
        output.print(f"study {result.study.study_name}: {counts}", markup=False)
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.phases_s.items())
    output.print(f"{phases}. Written: {', '.join(str(path) for path in result.files.values())}", markup=False)
