"""`autopipe drafts`: cheap drafters made from the target itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopipe.cli import arguments as arg
from autopipe.cli import distill_command, drafts_ngram_command, drafts_score_command

if TYPE_CHECKING:
    from autopipe.drafts.answers import Progress

drafts = typer.Typer(
    name="drafts",
    help="Make drafters from the target itself: record its answers, then learn from them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

_ANSWERS = """Record answers of the target: what drafters are learned from.

Without `--prompts` the target makes its own prompts (chat turns, function headers, passages to summarize), and the
functions and documentation of the Python standard library give more. HumanEval and the other bench sets are left out.
Every answer is kept with the 64 most probable tokens at each position, so that nothing has to be computed twice.

An interrupted run goes on where it was when you call it again; a folder can be grown later with a larger `--tokens`.

Examples:

- `autopipe drafts answers --out answers --tokens 300000`
- `autopipe drafts answers --target models/mine --prompts mine.jsonl --out answers --tokens 100000`

Then: `autopipe drafts ngram --answers answers --out table.safetensors`
"""


@drafts.command(help=_ANSWERS)
def answers(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the answers; made, or gone on with.")],
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Answer tokens there shall be in all.")
    ] = 300_000,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Your own prompts (JSON lines) instead of self-made ones."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", metavar="N", help="Longest answer.")] = 200,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Answers computed at a time, 1 to 64.")] = 32,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of all sampling.")] = 0,
    target: arg.Target = None,
    backend: arg.Backend = None,
    dtype: arg.Dtype = None,
    device: arg.Device = None,
    threads: arg.Threads = None,
    adapter: arg.Adapter = None,
    trust_remote_code: arg.TrustRemoteCode = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.cli.run_command import say
        from autopipe.drafts.making import make_answers

        stage = _target_stage(target, backend, dtype, device, adapter, trust_remote_code)
        with _token_progress(tokens) as report:
            done = make_answers(
                stage,
                out,
                tokens,
                prompts=prompts,
                max_new_tokens=max_new_tokens,
                slots=batch,
                threads=threads,
                seed=seed,
                say=say,
                report=report,
            )
        summary = {name: getattr(done, name) for name in done.__slots__}
        if json_output:
            print(json.dumps(summary))
        else:
            print(f"{done.num_tokens} tokens of {done.num_answers} answers in {out}")
            print(
                f"{done.made} prompts made, {done.useless} useless; dropped: {done.duplicates} duplicates, "
                f"{done.overlaps} with benchmark text, {done.too_long} too long",
                file=sys.stderr,
            )


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (drafts_ngram_command, distill_command, drafts_score_command):
        command.register(drafts)
    app.add_typer(drafts)


def _target_stage(
    target: str | None,
    backend: str | None,
    dtype: str | None,
    device: str | None,
    adapter: str | None,
    trust_remote_code: bool,
) -> Any:
    """The target's stage from its options.

    Raises:
        ConfigError: names the option.
    """
    from autopipe.core.models import DEFAULT_MODEL
    from autopipe.core.plan import StagePlan

    given = {"backend": backend, "dtype": dtype, "device": device, "adapter": adapter}
    fields = {name: value for name, value in given.items() if value is not None}
    return StagePlan.parse({"model": target or DEFAULT_MODEL, "trust_remote_code": trust_remote_code, **fields})


@contextmanager
def _token_progress(goal: int) -> Iterator[Callable[[Progress], None]]:
    """A bar with speed and time left on stderr; a line a minute where stderr is no terminal."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]:.0f}/s"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=goal, speed=0.0)
        first: tuple[float, int] | None = None
        last_said = time.monotonic()

        def report(progress: Progress) -> None:
            nonlocal first, last_said
            now = time.monotonic()
            if first is None:
                first, last_said = (now, progress.num_tokens), now
            speed = (progress.num_tokens - first[1]) / max(now - first[0], 1e-9)
            bar.update(task, completed=progress.num_tokens, speed=speed)
            if not console.is_terminal and now - last_said >= 60:
                last_said = now
                left = (goal - progress.num_tokens) / speed if speed else float("inf")
                print(
                    f"{progress.num_tokens} tokens, {speed:.0f}/s, {left / 60:.0f} min left",
                    file=sys.stderr,
                    flush=True,
                )

        yield report
