"""The learning curve of a training: agreement on held-out answers, as rows, CSV and a picture."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autopipe.core.errors import AutoPipeError
from autopipe.drafts.distill_data import Trimmer, grouped
from autopipe.drafts.distill_student import Student
from autopipe.drafts.store import Answer

_EVALUATION_TOKENS = 4096


@torch.no_grad()
def agreement(student: Student, answers: Sequence[Answer], trimmer: Trimmer) -> dict[str, float]:
    """Share of positions where the drafter's most probable token is the target's, by kind of prompt and for `all`.

    A token that the trimmed head lacks counts as disagreement. Positions follow the target's own text.
    """
    weights = student.step_weights()
    agreed: dict[str, int] = {}
    total: dict[str, int] = {}
    for kind in sorted({answer.meta["kind"] for answer in answers}):
        for group in grouped((answer for answer in answers if answer.meta["kind"] == kind), _EVALUATION_TOKENS):
            batch = trimmer.batch(group)
            hidden = weights.hidden(batch.ids, batch.lengths, batch.rows)
            picks = torch.cat([(chunk @ weights.head.t()).argmax(-1) for chunk in torch.split(hidden, 512)])
            for name in (kind, "all"):
                agreed[name] = agreed.get(name, 0) + int((picks == batch.best).sum())
                total[name] = total.get(name, 0) + len(picks)
    return {kind: agreed[kind] / total[kind] for kind in total}


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One row an evaluation; replaced as a whole."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    os.replace(temporary, path)


def write_picture(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Agreement over tokens trained on, one line for each kind of prompt.

    Raises:
        AutoPipeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise AutoPipeError("pictures need matplotlib: pip install 'autopipe-llm[plot]'") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    kinds = sorted({name.removeprefix("agreement_") for row in rows for name in row if name.startswith("agreement_")})
    for kind in kinds:
        points = [(row["trained_tokens"] / 1e6, row[f"agreement_{kind}"]) for row in rows if f"agreement_{kind}" in row]
        width = 2.2 if kind == "all" else 1.2
        axes.plot(*zip(*points, strict=True), marker=".", linewidth=width, label=kind)
    axes.set_xlabel("million tokens trained on (prompts included, repeats counted)")
    axes.set_ylabel("agreement with the target, held-out")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130, format="png")
