"""`autopipe plot`: pictures of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

HELP = """Draw what was measured.

Examples:

- `autopipe plot latency profile.json --out latency.png`
- `autopipe plot agreement profile.json --out agreement.svg`
- `autopipe simulate fit traces.jsonl.gz --json > fit.json`, then `autopipe plot predictions fit.json`
- `autopipe run "Explain rainbows." --trace trace.json`, then `autopipe plot timeline trace.json --length-ms 200`
"""

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help=HELP)

ProfileFile = Annotated[Path, typer.Argument(metavar="PROFILE", help="A file that `autopipe profile` wrote.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="The picture: .png, .svg or .pdf. Default: NAME-PLOT.png here."),
]


@app.command(help="Time of a forward by its number of tokens, from a profile.")
def latency(profile: ProfileFile, out: Out = None) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.plots import plot_latency
        from autopipe.profile import Profile

        _tell(plot_latency(Profile.load(profile), out or _default(profile, "latency")))


@app.command(help="Where drafters agree with the target, by kind of prompt and position, from a profile.")
def agreement(profile: ProfileFile, out: Out = None) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.plots import plot_agreement
        from autopipe.profile import Profile

        _tell(plot_agreement(Profile.load(profile), out or _default(profile, "agreement")))


@app.command(help="Predicted against measured ms/token, from the output of `autopipe simulate fit --json`.")
def predictions(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="Output of `autopipe simulate fit --json`.")],
    out: Out = None,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.plots import plot_predictions

        _tell(plot_predictions(_read(report, "REPORT"), out or _default(report, "predictions")))


@app.command(help="Who computed what and what was rolled back, from a trace of `autopipe run --trace FILE`.")
def timeline(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A Chrome trace.")],
    start_ms: Annotated[float, typer.Option("--start-ms", metavar="MS", help="Where the picture begins.")] = 0.0,
    length_ms: Annotated[
        float | None,
        typer.Option("--length-ms", metavar="MS", help="How long a stretch it shows. Default: to the end."),
    ] = None,
    out: Out = None,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.core.errors import ConfigError
        from autopipe.plots import plot_timeline

        if length_ms is not None and length_ms <= 0:
            raise ConfigError("--length-ms", length_ms, "above 0")
        picture = plot_timeline(
            _read(trace, "TRACE"), out or _default(trace, "timeline"), start_ms=start_ms, length_ms=length_ms
        )
        _tell(picture)


def register(root: typer.Typer) -> None:
    """Add the commands to the application."""
    root.add_typer(app, name="plot", help=HELP)


def _read(path: Path, key: str) -> dict[str, Any]:
    from autopipe.profile.model import read_json

    return read_json(path, key)


def _default(source: Path, plot: str) -> Path:
    return Path(f"{source.stem}-{plot}.png")


def _tell(path: Path) -> None:
    print(path)
