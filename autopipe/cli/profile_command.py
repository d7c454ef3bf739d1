"""`autopipe profile`: measure the stages of a plan on this machine and on the user's prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopipe.cli import arguments as arg

if TYPE_CHECKING:
    from autopipe.cli.options import PlanOptions
    from autopipe.profile import Profile
    from autopipe.profile.run import Advance

HELP = """Measure every stage of a plan once, so that any plan over them can be simulated.

What is measured, of each stage and thread count: time of a forward by number of tokens and context, prefill,
loading, memory; how stages slow each other down; what switching plans costs; and, from the target's own output
on your prompts, where each drafter agrees with it. The result is one JSON file (docs/profile.md).

An interrupted run goes on where it was when you call it again.

Examples:

- `autopipe profile` (the default chain on HumanEval and chat prompts, into profile.json)
- `autopipe profile --plan plan.yaml --prompts mine.jsonl --out mine.json`
- `autopipe profile --target big --drafter small --threads 2 --threads 8`

Then: `autopipe simulate --profile profile.json --plan other.yaml`
"""

_UNSTEADY = 0.15
"""With this share of unsteady times the user is told."""
DEFAULT_PROMPTS = ("humaneval:8", "chat:8")


def profile(
    prompts: arg.ProfilePrompts = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the profile goes.")] = Path("profile.json"),
    threads: Annotated[
        list[int] | None,
        typer.Option("--threads", metavar="N", help="A thread count to measure; repeat. Default: 1, 2, 4, ... cores."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Measurements of each point.")] = 5,
    max_new_tokens: arg.LongestOutput = 128,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not go on with an interrupted run.")] = False,
    plan: arg.PlanFile = None,
    target: arg.Target = None,
    drafter: arg.Drafters = None,
    backend: arg.Backend = None,
    dtype: arg.Dtype = None,
    device: arg.Device = None,
    adapter: arg.Adapter = None,
    exact: arg.Exact = None,
    trust_remote_code: arg.TrustRemoteCode = False,
    json_output: Annotated[bool, typer.Option("--json", help="Also print the profile to stdout.")] = False,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.cli.options import PlanOptions

        run(
            PlanOptions(
                plan=plan,
                target=target,
                drafters=drafter or (),
                backend=backend,
                dtype=dtype,
                device=device,
                adapter=adapter,
                exact=exact,
                trust_remote_code=trust_remote_code,
            ),
            prompt_sets=tuple(prompts or DEFAULT_PROMPTS),
            out=out,
            threads=threads,
            repeats=repeats,
            max_new_tokens=max_new_tokens,
            fresh=fresh,
            json_output=json_output,
        )


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(name="profile", help=HELP)(profile)


def run(
    options: PlanOptions,
    *,
    prompt_sets: Sequence[str],
    out: Path,
    threads: Sequence[int] | None,
    repeats: int,
    max_new_tokens: int,
    fresh: bool,
    json_output: bool,
) -> None:
    """Measure, show progress on stderr, say what was found.

    Raises:
        ConfigError: a bad option, before anything is loaded. AutoPipeError: a stage fails.
    """
    from autopipe.cli.options import build_plan, naming_options, require_context
    from autopipe.cli.run_command import say
    from autopipe.core.errors import ConfigError
    from autopipe.core.sampling import SamplingParams
    from autopipe.inputs import require_writable

    for key, value, least in (("--repeats", repeats, 1), ("--max-new-tokens", max_new_tokens, 2)):
        if value < least:
            raise ConfigError(key, value, f"{least} or more")
    for count in threads or ():
        if not 1 <= count <= 1024:
            raise ConfigError("--threads", count, "1 to 1024")
    require_writable(out, "--out")
    built = build_plan(options)

    from autopipe.bench.workload import encode_workload, read_workload
    from autopipe.core.preflight import inspect_plan
    from autopipe.profile import profile_plan

    chosen = read_workload(prompt_sets, "--prompts")
    with naming_options(options, built):
        info = inspect_plan(built, progress=say)
    require_context(info, SamplingParams(max_new_tokens=max_new_tokens))
    with progress() as advance:
        advance("tokenizing prompts", 0.0)
        found = profile_plan(
            built,
            encode_workload(chosen, built),
            out,
            prompt_sets=prompt_sets,
            eos_token_ids=info.eos_token_ids,
            threads=threads,
            repeats=repeats,
            max_new_tokens=max_new_tokens,
            resume=not fresh,
            advance=advance,
        )
    show(found, out)
    if json_output:
        print(json.dumps(found.model_dump(mode="json")))


@contextmanager
def progress() -> Iterator[Advance]:
    """A progress bar on stderr; one line for each thing begun where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>32}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        last = ""

        def advance(label: str, share: float) -> None:
            nonlocal last
            bar.update(task, completed=share, description=label)
            if not console.is_terminal and label != last:
                print(f"[{share:4.0%}] {label}", file=sys.stderr)
            last = label

        yield advance


def show(found: Profile, out: Path) -> None:
    """A summary on stderr."""
    from rich.table import Table

    from autopipe.cli.show import console, number

    table = Table(title=f"Profile {found.content_hash}: {out}")
    for heading in ("stage", "threads", "1 token ms", "4 ms", "8 ms", "16 ms", "load s", "memory MiB", "agreement"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    rates = {each.drafter: each.rate for each in found.agreement}
    for stage in found.stages:
        for curves in stage.curves:
            context = min(point.context for point in curves.verify)
            points = {point.tokens: 1e3 * point.seconds for point in curves.verify if point.context == context}
            table.add_row(
                stage.name,
                str(curves.threads),
                *(number(points.get(n)) for n in (1, 4, 8, 16)),
                number(stage.load_s, 1),
                number(stage.memory.resident_bytes / 2**20, 0),
                number(rates.get(stage.name), 3),
            )
    offered = sum(sum(offer.length) for offer in found.ngram.prompts)
    first_right = sum(right > 0 for offer in found.ngram.prompts for right in offer.right)
    tokens = sum(len(prompt.output_ids) for prompt in found.prompts)
    console(stderr=True).print(table)
    print(
        f"ngram: first draft right at {first_right / tokens:.3f} of {tokens} positions "
        f"({offered / tokens:.1f} drafts offered at each); measured in {found.took_s:.0f} s",
        file=sys.stderr,
    )
    if found.unsteady_share > _UNSTEADY:
        print(
            f"note: {found.unsteady_share:.0%} of the times vary by more than a fifth; something else computed, so "
            "predictions will be off: measure again on an idle machine.",
            file=sys.stderr,
        )
