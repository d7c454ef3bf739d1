"""A learned n-gram table from recorded answers: built on one part, tuned and calibrated on the held-out part."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autopipe.core.errors import ConfigError
from autopipe.core.gating import StepCosts
from autopipe.core.ngram import CALIBRATION_KEY, NgramDrafter
from autopipe.core.ngram_calibration import Calibration
from autopipe.core.ngram_features import PRIOR
from autopipe.core.ngram_shipped import TOKENIZER_KEY
from autopipe.core.ngram_table import MAX_TABLE_ORDER, NgramTable
from autopipe.core.plan import NgramOptions
from autopipe.drafts.expected_speed import ExpectedSpeed, expected_speed
from autopipe.drafts.store import read_answers, read_header
from autopipe.profile.model import PromptRecord
from autopipe.profile.ngram_replay import replay

ORDERS = (3, 4, 5, 6)
MIN_COUNTS = (1, 2)
_CONTEXT = 3
"""Tokens of the prompt before an answer that count as context."""
_TUNING_TOKENS = 12_000
_PASSES = 2

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """A way to build the table, and what it would bring on held-out answers.

    Attributes:
        speed: by kind of prompt, and `all`.
    """

    max_order: int
    min_count: int
    num_entries: int
    speed: dict[str, ExpectedSpeed]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        figures = {
            kind: {"speedup": speed.speedup, "acceptance_length": speed.acceptance_length, "tokens": speed.num_tokens}
            for kind, speed in self.speed.items()
        }
        return {
            "max_order": self.max_order,
            "min_count": self.min_count,
            "entries": self.num_entries,
            "expected": figures,
        }


def make_table(
    answers: str | Path,
    out: str | Path,
    *,
    max_bytes: int = 7 << 20,
    max_order: int | None = None,
    min_count: int | None = None,
    costs: StepCosts | None = None,
    say: Say = lambda line: None,
) -> list[Trial]:
    """Build a table from a folder of answers and write it, with its calibration, to `out`.

    Orders and counts that are not given are chosen, and the calibration is fitted, on half of the held-out answers;
    the other half says what the table is worth. Benchmark prompts play no part.

    Args:
        answers: folder made by `autopipe drafts answers`.
        out: the table's file.
        max_bytes: budget for the table's entries.
        max_order: longest context in tokens; None: chosen among 3 to 6.
        min_count: contexts seen less often are dropped; None: chosen between 1 and 2.
        costs: t(n) of the target; None: the prior of the fused target.
        say: told what is going on.

    Returns:
        All trials, the chosen one first, its speed measured on the held-out half that chose nothing.

    Raises:
        ConfigError: not a folder of answers, one without held-out answers, or an argument out of range.
    """
    if max_order is not None and not 1 <= max_order <= MAX_TABLE_ORDER:
        raise ConfigError("--max-order", max_order, f"1 to {MAX_TABLE_ORDER}")
    if min_count is not None and min_count < 1:
        raise ConfigError("--min-count", min_count, "1 or more")
    header = read_header(answers, "--answers")
    train = _answers_alone(answers)
    tuning, checking = _halves(_records(answers))
    if not tuning or not checking or not train:
        raise ConfigError("--answers", str(answers), "a folder with training and held-out answers; make more of them")
    costs = costs or StepCosts()
    orders = ORDERS if max_order is None else (max_order,)
    counts = MIN_COUNTS if min_count is None else (min_count,)
    trials = []
    for order in orders:
        for count in counts:
            table = NgramTable.build(train, max_order=order, min_count=count, max_bytes=max_bytes)
            say(f"trying contexts of up to {order} tokens seen {count} times or more: {len(table)} entries")
            trials.append(Trial(order, count, len(table), speeds(table, tuning, costs)))
    trials.sort(key=lambda trial: -trial.speed["all"].speedup)
    best = trials[0]
    table = NgramTable.build(train, max_order=best.max_order, min_count=best.min_count, max_bytes=max_bytes)
    say("calibrating")
    weights = calibrated(table, tuning)
    metadata = {
        TOKENIZER_KEY: str(header["tokenizer"]),
        "target": str(header["target"]),
        "answer_tokens": str(sum(map(len, train)) - _CONTEXT * len(train)),
        CALIBRATION_KEY: json.dumps([round(weight, 3) for weight in weights]),
    }
    table = NgramTable.build(
        train, max_order=best.max_order, min_count=best.min_count, max_bytes=max_bytes, metadata=metadata
    )
    table.save(out)
    final = Trial(best.max_order, best.min_count, len(table), speeds(table, checking, costs))
    return [final, *trials]


def speeds(table: NgramTable | None, records: Sequence[PromptRecord], costs: StepCosts) -> dict[str, ExpectedSpeed]:
    """Expected speed with a table (None: own text alone), by kind of prompt and for `all`."""
    offers = replay(NgramOptions(), records, table=table).prompts
    found = {}
    for kind in dict.fromkeys(record.kind for record in records):
        chosen = [offer for offer, record in zip(offers, records, strict=True) if record.kind == kind]
        found[kind] = expected_speed(chosen, costs)
    return {"all": expected_speed(offers, costs), **found}


def calibrated(table: NgramTable, records: Iterable[PromptRecord]) -> list[float]:
    """Weights of the drafter's calibration, fitted by passing over held-out answers."""
    calibration = Calibration(PRIOR)
    records = list(records)
    for _ in range(_PASSES):
        for record in records:
            drafter = NgramDrafter(NgramOptions(), table, calibration)
            drafter.sync(record.prompt_ids, 0)
            drafter.sync((*record.prompt_ids, *record.output_ids), len(record.prompt_ids))
    weights = calibration.weights
    return weights if all(map(math.isfinite, weights)) else list(PRIOR)


def _answers_alone(folder: str | Path) -> list[npt.NDArray[np.int32]]:
    """The training answers, each behind the end of its prompt: what a prompt says is not the target's habit."""
    return [
        answer.token_ids[max(0, answer.prompt_length - _CONTEXT) :]
        for answer in read_answers(folder, split="train", key="--answers")
    ]


def _records(folder: str | Path) -> list[PromptRecord]:
    """Held-out greedy answers as the replay wants them."""
    return [
        PromptRecord(
            name=answer.meta["key"],
            kind=answer.meta["kind"],
            prompt_ids=tuple(answer.token_ids[: answer.prompt_length].tolist()),
            output_ids=tuple(answer.token_ids[answer.prompt_length :].tolist()),
            finish_reason=answer.meta["finish_reason"],
            decode_s=0.0,
        )
        for answer in read_answers(folder, split="heldout", key="--answers")
        if answer.meta["sampling"] == "greedy"
    ]


def _halves(records: Sequence[PromptRecord]) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Two parts with the same mix of kinds, each of at most 12,000 answer tokens."""
    halves: tuple[list[PromptRecord], list[PromptRecord]] = ([], [])
    for kind in dict.fromkeys(record.kind for record in records):
        for index, record in enumerate(record for record in records if record.kind == kind):
            halves[index % 2].append(record)
    return _limited(halves[0]), _limited(halves[1])


def _limited(records: Sequence[PromptRecord]) -> list[PromptRecord]:
    total = sum(len(record.output_ids) for record in records)
    keep_one_in = max(1, -(-total // _TUNING_TOKENS))
    return list(records[::keep_one_in])
