"""The plan as a file that says what it is, why it was chosen, and where."""

from __future__ import annotations

import datetime
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from autopipe import __version__
from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan
from autopipe.core.tuned import Tuned
from autopipe.profile.identity import describe_machine
from autopipe.tune.predict import Prediction
from autopipe.tune.result import Measured, TuneResult
from autopipe.tune.space import structure

_WIDTH = 110


def tuned_plan(
    plan: Plan,
    *,
    objective: str,
    workload: Sequence[str],
    prediction: Prediction | None,
    plain: Prediction | None,
    measured: Mapping[str, float | None] | None = None,
) -> Plan:
    """The plan with its `tuned` section.

    Args:
        measured: as `measured_figures` or `plain_figures` makes it; None: the figures are predicted only.
    """
    predicted: dict[str, float | None] = {}
    if prediction is not None and plain is not None:
        predicted = {
            "ms_per_token": _round(prediction.ms_per_token),
            "slow_ms_per_token": _round(prediction.slow_ms_per_token),
            "speedup": _round(plain.ms_per_token / prediction.ms_per_token),
            "ttft_ms": _round(1e3 * prediction.ttft_s),
            "memory_mib": _round(prediction.total_memory_bytes / 2**20),
            "j_per_token": _round(prediction.j_per_token),
        }
    tuned = Tuned(
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        version=__version__,
        objective=objective,
        workload=tuple(workload),
        machine=describe_machine(),
        predicted=predicted,
        measured=dict(measured or {}),
    )
    return plan.replace(tuned=tuned)


def measured_figures(row: Measured) -> dict[str, float | None]:
    """What the live check measured of the plan that it chose."""
    return {
        "ms_per_token": _round(row.ms_per_token),
        "plain_ms_per_token": _round(row.plain_ms_per_token),
        "slow_ms_per_token": _round(row.slow_ms_per_token),
        "plain_slow_ms_per_token": _round(row.plain_slow_ms_per_token),
        "speedup": _round(row.speedup),
        **{f"speedup_{kind}": _round(value) for kind, value in row.by_kind.items()},
        "ttft_ms": _round(None if row.ttft_s is None else 1e3 * row.ttft_s),
        "j_per_token": _round(row.j_per_token),
    }


def plain_figures(beside: Measured, best: Measured | None) -> dict[str, float | None]:
    """What the live check measured of plain decoding, when it wins.

    Args:
        beside: the plan beside which plain decoding was measured.
        best: the best plan that might have been chosen; None: none might.

    Returns:
        Plain decoding's figures, and how many times as good as it the best plan was by the objective.
    """
    return {
        "ms_per_token": _round(beside.plain_ms_per_token),
        "slow_ms_per_token": _round(beside.plain_slow_ms_per_token),
        "speedup": 1.0,
        "best_candidate_gain": None if best is None else _round(best.gain),
    }


def plan_text(result: TuneResult) -> str:
    """A plan file: comments for people, then YAML."""
    plan = result.plan
    if plan.tuned is None:
        raise ValueError("a plan without its tuned section")
    lines = [f"{structure(plan)}: {result.reason}."]
    winner = result.winner
    if winner is not None and winner.ms_per_token is not None:
        kinds = ", ".join(f"{kind} {gain:.2f}x" for kind, gain in winner.by_kind.items())
        lines.append(
            f"Measured {winner.ms_per_token:.2f} ms per token, plain decoding {winner.plain_ms_per_token:.2f}: "
            f"{winner.speedup:.2f}x ({kinds}), in {winner.prompts} measurements."
        )
    if result.prediction is not None and result.plain_prediction is not None:
        lines.append(
            f"Predicted {result.prediction.ms_per_token:.2f} ms per token, plain decoding "
            f"{result.plain_prediction.ms_per_token:.2f}."
        )
    machine = plan.tuned.machine
    lines.append(
        f"Tuned for {result.objective.value} on {', '.join(plan.tuned.workload)}; {plan.tuned.created_at}, AutoPipe "
        f"{plan.tuned.version}, {machine.cpu or machine.platform}, {machine.cores} cores"
        f"{', ' + ', '.join(machine.gpus) if machine.gpus else ''}."
    )
    lines += [f"Note: {note}." for note in result.notes]
    lines.append("Use it: autopipe run --plan FILE, autopipe bench --plan FILE, AutoPipe.from_plan(FILE).")
    return _commented(lines, plan)


def front_text(plan: Plan, place: int) -> str:
    """The file of the plan at this place of the front, 1 the first."""
    predicted = "Its figures are predicted only; which plans were measured, the report says"
    return _commented([f"Plan {place} of the front: {structure(plan)}.", f"{predicted}."], plan)


def write_plan(path: Path, text: str, key: str = "--out") -> None:
    """Write it so that a reader never meets half a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(key, str(path), f"a file that can be written ({error})") from None


def _commented(lines: Sequence[str], plan: Plan) -> str:
    comment = [part for line in lines for part in textwrap.wrap(" ".join(line.split()), _WIDTH)]
    return "".join(f"# {line}\n" for line in comment) + plan.to_yaml()


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
