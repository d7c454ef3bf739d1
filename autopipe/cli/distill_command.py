"""`autopipe drafts distill`: train a drafter out of the target's own layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from autopipe.drafts.distill import Progress

HELP = """Train a neural drafter out of the target's own layers, on answers of the target.

The drafter keeps the layers of `--layers`, adapted with LoRA (through `peft`), and an output head of the `--head` most
frequent tokens. It learns from the probabilities stored with the answers, so the target itself is not run.

Training takes hours on a CPU. It may be stopped at any moment: the same command goes on from the last checkpoint, and
`DIR/drafter` always holds the drafter as it stands, `DIR/curve.csv` and `.png` its agreement on held-out answers.

Examples:

- `autopipe drafts answers --out answers --tokens 400000`
- `autopipe drafts distill --answers answers --out training --layers 0-3 --rank 64 --head 8192`
- `autopipe drafts distill --answers mine --out training --from smollm2-135m --tokens 1000000`: train the shipped
  drafter on, on answers to your own prompts

Then name the drafter in a plan, before the target: `{model: smollm2-135m, adapter: training/drafter}`
"""


def distill(
    answers: Annotated[
        Path, typer.Option("--answers", metavar="DIR", help="Answers of the target (`autopipe drafts answers`).")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the training; gone on with if begun.")],
    target: Annotated[
        str | None, typer.Option("--target", metavar="MODEL", help="The model that gave the answers.")
    ] = None,
    begin_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="DRAFTER",
            help="Begin with this drafter (a folder, or the model whose drafter ships), its layers, rank and head.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", metavar="LIST", help="Layers to keep, in this order: `0-3` (default), `0,1,2,29`."),
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Rank of LoRA; default: 64.")] = None,
    head: Annotated[
        int | None, typer.Option("--head", metavar="N", help="Tokens the drafter can draft; default: 8192.")
    ] = None,
    lora_head: Annotated[
        bool | None,
        typer.Option("--lora-head", help="Adapt the head with LoRA too, instead of training its rows in full."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Tokens to train on in all, repeats counted.")
    ] = None,
    batch_tokens: Annotated[int | None, typer.Option("--batch-tokens", metavar="N", help="Tokens a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="Peak, of LoRA's matrices.")] = None,
    head_learning_rate: Annotated[
        float | None, typer.Option("--head-learning-rate", help="Peak, of the head and the norms.")
    ] = None,
    cooldown: Annotated[
        float | None, typer.Option("--cooldown", help="Share of the tokens over which learning rates fall to 0.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--start", metavar="NAME", help="Head to start from: `lens` (fitted) or `copy`.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", metavar="NAME", help="`muon` or `adam`.")] = None,
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", metavar="KIND", help="Only answers of this kind; repeatable.")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option("--evaluate-every", metavar="N", help="Tokens between evaluations and checkpoints.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", metavar="N", help="Longer answers are cut at so many tokens.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of order and initialisation.")] = 0,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Compute threads; default: all.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        import torch

        from autopipe.cli.run_command import say
        from autopipe.core.errors import ConfigError
        from autopipe.core.models import DEFAULT_MODEL
        from autopipe.drafts.distill import Distiller
        from autopipe.drafts.distill_beginning import Beginning
        from autopipe.drafts.distill_options import DistillOptions

        given: dict[str, Any] = {
            "layers": None if layers is None else parse_layers(layers),
            "rank": rank,
            "head": head,
            "train_head": None if lora_head is None else not lora_head,
            "begin_from": begin_from,
            "tokens": tokens,
            "batch_tokens": batch_tokens,
            "learning_rate": learning_rate,
            "head_learning_rate": head_learning_rate,
            "cooldown": cooldown,
            "start": start,
            "optimizer": optimizer,
            "kinds": kinds or None,
            "evaluate_every": evaluate_every,
            "max_length": max_length,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        try:
            options = DistillOptions.parse({"seed": seed, **fields})
        except ConfigError as error:
            raise ConfigError(f"--{error.key.replace('_', '-')}", error.value, error.allowed) from None
        if begin_from is not None:
            own = {"--layers": layers, "--rank": rank, "--head": head, "--lora-head": lora_head, "--start": start}
            for option, value in own.items():
                if value is not None:
                    raise ConfigError(option, value, "left out beside --from, whose drafter has its own")
            options = Beginning.read(begin_from).adopt(options)
        if threads is not None:
            if threads < 1:
                raise ConfigError("--threads", threads, "1 or more")
            torch.set_num_threads(threads)
        distiller = Distiller(target or DEFAULT_MODEL, answers, out, options)
        if distiller.progress.step:
            say(f"going on at {distiller.progress.trained_tokens:,} of {options.tokens:,} tokens")
        coverage = distiller.heldout_coverage
        say(f"the head has the target's first choice at {coverage:.1%} of held-out positions")
        with _bar(options.tokens) as report:
            progress = distiller.run(report)
        last = progress.curve[-1]
        if json_output:
            print(json.dumps({**last, "heldout_coverage": coverage, "drafter": str(out / "drafter")}))
        else:
            print(f"the drafter is in {out / 'drafter'}")
            print(_result(last))


def register(drafts: typer.Typer) -> None:
    """Add the command to `autopipe drafts`."""
    drafts.command(help=HELP)(distill)


def parse_layers(text: str) -> tuple[int, ...]:
    """`0-3` or `0,1,2,29` or a mixture.

    Raises:
        ConfigError: neither.
    """
    from autopipe.core.errors import ConfigError

    layers: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            layers.extend(range(int(first), int(last) + 1) if dash else [int(first)])
    except ValueError:
        layers = []
    if not layers:
        raise ConfigError("--layers", text, "numbers and ranges of layers, such as `0-3` or `0,1,2,29`")
    return tuple(layers)


def _result(row: dict[str, Any]) -> str:
    scores = {name.removeprefix("agreement_"): value for name, value in row.items() if name.startswith("agreement_")}
    agreement = ", ".join(f"{kind} {value:.3f}" for kind, value in scores.items())
    speed = f", {row['tokens_per_s']:.0f} tokens/s" if row["tokens_per_s"] else ""
    return f"{row['trained_tokens']:,} tokens, loss {row['loss']:.3f}, agreement {agreement}{speed}"


@contextmanager
def _bar(total: int) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr, and a line for every evaluation."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    from autopipe.cli.run_command import say

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]:.0f}/s, loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, speed=0.0, loss=float("nan"))
        shown = 0

        def report(progress: Progress) -> None:
            nonlocal shown
            bar.update(task, completed=progress.trained_tokens, speed=progress.tokens_per_s, loss=progress.loss)
            for row in progress.curve[shown:]:
                if console.is_terminal:
                    console.print(_result(row))
                else:
                    say(_result(row))
            shown = len(progress.curve)

        yield report
