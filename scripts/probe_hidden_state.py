#!/usr/bin/env python
"""What does the target's last hidden state know that the neural drafter does not? (EAGLE, arXiv 2401.15077)

    .venv/bin/python scripts/probe_hidden_state.py --answers out/drafter/more/answers

When a target has verified a text it has the state from which it picked the last token, and a drafter could read that
for its first draft. Here the shipped drafter stays as it is, and a linear map of that state, trained on the drafter's
own loss, is added to what its head reads: the least that a drafter with the state could do. Printed is the share of
held-out positions at which the most probable token is the target's, with and without. Nothing is saved: the engine has
no such drafter.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopipe.core.backends.fused_config import shape_of
from autopipe.core.models import load_config, load_state, resolve
from autopipe.core.models.shared_base import read_head_ids
from autopipe.drafts.distill_beginning import Beginning
from autopipe.drafts.distill_blocks import hidden_states, rms_norm
from autopipe.drafts.distill_data import AnswerPool, Trimmer, grouped, heldout_sample
from autopipe.drafts.distill_lens import teacher_blocks
from autopipe.drafts.distill_loss import head_loss
from autopipe.drafts.distill_student import Student
from autopipe.drafts.store import Answer

BATCH_ROWS = 2048


@dataclass(frozen=True)
class Rows:
    """Positions of answers, [n, ...] each.

    Attributes:
        own: what the drafter's head reads. state: the target's, from which the last token was picked, of unit size.
        kinds: of the texts.
    """

    own: torch.Tensor
    state: torch.Tensor
    token_ids: torch.Tensor
    target_probs: torch.Tensor
    kept_probability: torch.Tensor
    best: torch.Tensor
    kinds: list[str]


class Models:
    """The target and its shipped drafter, as they are trained with."""

    def __init__(self, name: str) -> None:
        source = resolve(name)
        config, state, beginning = load_config(source), load_state(source), Beginning.read(name)
        head_ids = read_head_ids(beginning.folder, beginning.info).long()
        self._student = Student(
            config,
            state,
            layers=beginning.info.layers,
            head_ids=head_ids,
            rank=beginning.rank,
            alpha=beginning.alpha,
            train_head=beginning.train_head,
        )
        self._student.load(beginning.folder)
        self._trimmer = Trimmer(head_ids.numpy(), config.vocab_size)
        self._shape, (self._blocks, _) = shape_of(config), teacher_blocks(config, state)
        self.head = self._student.head().detach()

    @torch.no_grad()
    def rows(self, answers: Sequence[Answer], what: str) -> Rows:
        weights, parts = self._student.step_weights(), []
        kinds: list[str] = []
        for group in track(list(grouped(answers, BATCH_ROWS)), what, console=Console(stderr=True)):
            batch = self._trimmer.batch(group)
            x = hidden_states(self._shape, self._blocks, self._student.embed(batch.ids), batch.lengths)
            states = rms_norm(x, torch.ones(x.shape[-1]), self._shape.norm_epsilon)
            own = weights.hidden(batch.ids, batch.lengths, batch.rows)
            # The token at a position was picked from the state one position before it.
            parts.append((own, states[batch.rows - 1], batch.token_ids, batch.target_probs,
                          batch.kept_probability, batch.best))  # fmt: skip
            kinds += [str(answer.meta["kind"]) for answer in group for _ in range(answer.num_answer_tokens)]
        return Rows(*(torch.cat(column) for column in zip(*parts, strict=True)), kinds=kinds)


def train(rows: Rows, head: torch.Tensor, epochs: int, learning_rate: float) -> torch.Tensor:
    """The map, [hidden, hidden]."""
    size = rows.own.shape[1]
    mapped = torch.zeros(size, size, requires_grad=True)
    optimizer = torch.optim.AdamW([mapped], weight_decay=0.0)
    steps = epochs * (len(rows.own) // BATCH_ROWS)
    generator = torch.Generator().manual_seed(0)
    for step in track(range(steps), "training the map", console=Console(stderr=True)):
        chosen = torch.randint(len(rows.own), (BATCH_ROWS,), generator=generator)
        x = rows.own[chosen] + rows.state[chosen] @ mapped.t()
        weights = rows.kept_probability[chosen]
        loss = head_loss(x, head, rows.token_ids[chosen], rows.target_probs[chosen], weights)
        (loss / weights.sum()).backward()
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    return mapped.detach()


@torch.no_grad()
def agreement(rows: Rows, head: torch.Tensor, mapped: torch.Tensor | None) -> dict[str, float]:
    x = rows.own if mapped is None else rows.own + rows.state @ mapped.t()
    right = torch.cat([(chunk @ head.t()).argmax(-1) for chunk in x.split(512)]) == rows.best
    found = {"all": float(right.float().mean())}
    for kind in sorted(set(rows.kinds)):
        of_kind = torch.tensor([each == kind for each in rows.kinds])
        found[kind] = float(right[of_kind].float().mean())
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="one with a shipped drafter")
    parser.add_argument("--answers", type=Path, required=True, help="folder of `autopipe drafts answers`")
    parser.add_argument("--tokens", type=int, default=100_000, help="of prompts and answers to train on")
    parser.add_argument("--heldout-tokens", type=int, default=12_000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args()


def main() -> None:
    options, started = parse(), time.monotonic()
    heldout = heldout_sample(AnswerPool(options.answers, "heldout", max_length=512).answers, options.heldout_tokens)
    answers = AnswerPool(options.answers, "train", max_length=512).answers
    random.Random(0).shuffle(answers)
    pool: list[Answer] = []
    while answers and sum(len(answer.token_ids) for answer in pool) < options.tokens:
        pool.append(answers.pop())
    models = Models(options.target)
    unseen, seen = models.rows(heldout, "held-out answers"), models.rows(pool, "answers")
    mapped = train(seen, models.head, options.epochs, options.learning_rate)
    result = {
        "without": agreement(unseen, models.head, None),
        "with": agreement(unseen, models.head, mapped),
        "with, trained on": agreement(seen, models.head, mapped),
        "without, trained on": agreement(seen, models.head, None),
    }
    minutes = (time.monotonic() - started) / 60
    if options.json:
        print(json.dumps({**result, "minutes": minutes}))
        return
    table = Table("agreement of the first draft", *result["with"])
    for name, shares in result.items():
        table.add_row(name, *(f"{share:.3f}" for share in shares.values()))
    Console().print(table)
    print(f"{minutes:.0f} minutes, {len(unseen.own)} held-out positions, {len(seen.own)} trained on")


if __name__ == "__main__":
    main()
