"""`report.html`: one file that shows what was chosen, and why."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from autopipe.core.errors import ConfigError
from autopipe.tune.objective import Goal
from autopipe.tune.pictures import TITLES, importances
from autopipe.tune.plan_file import plan_text
from autopipe.tune.result import Measured, TuneResult, count_states
from autopipe.tune.search import ranking
from autopipe.tune.space import structure

_SHOWN = 20
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2330; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-size: 13px; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #dde; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f4f5f8; padding: 1rem; overflow-x: auto; font-size: 13px; }
img { max-width: 100%; } .verdict { font-size: 1.2rem; } tr.chosen { background: #e9f6ea; }
"""


def write_report(path: Path, result: TuneResult, goals: Sequence[Goal], pictures: Mapping[str, Path]) -> None:
    """Write the report; pictures are inside it.

    Raises:
        ConfigError: the file cannot be written.
    """
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>autopipe tune</title>",
        f"<style>{_STYLE}</style><h1>autopipe tune</h1>",
        f"<p class='verdict'>{html.escape(structure(result.plan))}: {html.escape(result.reason)}.</p>",
        f"<pre>{html.escape(plan_text(result))}</pre>",
        _live(result.measured),
        _search(result, goals),
        _front(result),
        *(_picture(name, pictures[name]) for name in TITLES if name in pictures),
        _important(result, goals),
        _about(result),
        "</html>",
    ]
    try:
        path.write_text("\n".join(part for part in parts if part), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--report", str(path), f"a file that can be written ({error})") from None


def _live(measured: Sequence[Measured]) -> str:
    if not measured:
        return ""
    rows = [
        (
            each.name,
            structure(each.plan),
            _number(each.prediction.ms_per_token),
            _number(each.ms_per_token),
            _number(each.speedup, "x"),
            ", ".join(f"{kind} {gain:.2f}x" for kind, gain in each.by_kind.items()),
            f"{each.p_better:.3f}",
            str(each.prompts),
            each.verdict,
        )
        for each in measured
    ]
    headings = (
        "plan", "chain", "predicted ms/token", "measured", "over plain", "by kind", "p", "measurements", "verdict",
    )  # fmt: skip
    chosen = [place for place, each in enumerate(measured) if each.verdict == "chosen"]
    return "<h2>Live check</h2><p>Each plan and plain decoding ran the same prompts right after each other.</p>" + (
        _table(headings, rows, chosen)
    )


def _search(result: TuneResult, goals: Sequence[Goal]) -> str:
    if result.study is None:
        return ""
    counts = ", ".join(f"{count} {state}" for state, count in count_states(result.study).items())
    found = ranking(result.study, goals)
    rows = [
        (
            str(each.trial.number),
            structure(each.plan),
            ", ".join(str(stage.window) for stage in each.plan.drafters) or "-",
            _number(each.prediction.ms_per_token),
            _number(1e3 * each.prediction.ttft_s),
            _number(each.prediction.total_memory_bytes / 2**20),
            _number(each.prediction.j_per_token),
        )
        for each in found[:_SHOWN]
    ]
    headings = ("trial", "chain", "windows", "ms/token", "first token ms", "memory MiB", "J/token")
    return (
        f"<h2>Simulated search</h2><p>Study {html.escape(result.study.study_name)}: {counts}; {len(found)} "
        f"different feasible plans. The best:</p>" + _table(headings, rows)
    )


def _front(result: TuneResult) -> str:
    if not result.front:
        return ""
    rows = [
        (
            structure(plan),
            _number(found.tokens_per_s),
            _number(1e3 * found.ttft_s),
            _number(found.total_memory_bytes / 2**20),
            _number(found.j_per_token),
        )
        for plan, found in result.front
    ]
    return "<h2>Front</h2>" + _table(("chain", "tokens/s", "first token ms", "memory MiB", "J/token"), rows)


def _important(result: TuneResult, goals: Sequence[Goal]) -> str:
    found = {} if result.study is None else importances(result.study, len(goals) > 1)
    if not found:
        return ""
    rows = [(name, f"{value:.3f}") for name, value in sorted(found.items(), key=lambda item: -item[1])]
    return "<h2>Parameters</h2>" + _table(("parameter", "importance"), rows)


def _about(result: TuneResult) -> str:
    rows = [(f"{name} phase", f"{seconds:.1f} s") for name, seconds in result.phases_s.items()]
    rows += [("note", note) for note in result.notes]
    tuned = result.plan.tuned
    if tuned is not None:
        machine = tuned.machine
        rows += [
            ("made", f"{tuned.created_at}, AutoPipe {tuned.version}"),
            ("objective", tuned.objective),
            ("workload", ", ".join(tuned.workload)),
            ("machine", f"{machine.cpu or machine.platform}, {machine.cores} cores, {machine.fingerprint}"),
            ("GPUs", ", ".join(machine.gpus) or "none"),
            *((name, version or "not installed") for name, version in machine.libraries.items()),
        ]
    if result.profile is not None:
        rows.append(("profile", f"{result.profile.content_hash}, measured {result.profile.created_at}"))
    return "<h2>About</h2>" + _table(("what", ""), rows)


def _picture(name: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<h2>{TITLES[name]}</h2><img alt='{TITLES[name]}' src='data:image/png;base64,{data}'>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], chosen: Sequence[int] = ()) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = []
    for place, row in enumerate(rows):
        cells = "".join(f"<td{_align(cell)}>{html.escape(cell)}</td>" for cell in row)
        body.append(f"<tr{' class=chosen' if place in chosen else ''}>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"


def _align(cell: str) -> str:
    return " class=n" if cell.rstrip("x").replace(".", "").isdigit() else ""


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
