#!/usr/bin/env python
"""How much better would the neural drafter be if it also read the target's last hidden state? (EAGLE, arXiv 2401.15077)

    .venv/bin/python scripts/probe_hidden_state.py --answers out/drafter/more/answers --tokens 200000

The shipped drafter gets one more input: at each token, the target's last hidden state from which that token was picked,
through a linear map that starts at zero and is trained with the rest. A target that has verified a text knows these
states up to its last token; for drafts after it they are missing, so training leaves out runs of one to three as well.
Measured is the share of held-out positions where the drafter's pick is the target's, for the first to the fourth draft
after a verified text, each given that the drafts before it are right, as the drafter is and after training. Nothing is
saved: the engine has no such drafter.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from autopipe.core.backends.fused_config import shape_of
from autopipe.core.models import load_config, load_state, resolve
from autopipe.core.models.shared_base import read_head_ids
from autopipe.drafts.distill_beginning import Beginning
from autopipe.drafts.distill_blocks import hidden_states, rms_norm
from autopipe.drafts.distill_data import AnswerPool, Trimmer, grouped, heldout_sample
from autopipe.drafts.distill_lens import teacher_blocks
from autopipe.drafts.distill_loss import head_loss
from autopipe.drafts.distill_optimizer import Optimizer, schedule
from autopipe.drafts.distill_student import Student
from autopipe.drafts.store import Answer

WINDOW = 4
KEPT_RUN = 5
"""Mean length of runs of tokens whose states are known in training; between them one to three are missing."""


class Teacher:
    """The target's last hidden states, of unit root mean square."""

    def __init__(self, target: str) -> None:
        source = resolve(target)
        self.config, self.state = load_config(source), load_state(source)
        self._shape = shape_of(self.config)
        self._blocks, _ = teacher_blocks(self.config, self.state)
        self._embedding = self.state["model.embed_tokens.weight"].float()

    @torch.no_grad()
    def states(self, answers: Sequence[Answer]) -> list[torch.Tensor]:
        """For each token of each answer the state from which it was picked, [n, hidden] bf16; zero for the first."""
        lengths = tuple(len(answer.token_ids) for answer in answers)
        ids = torch.cat([torch.from_numpy(answer.token_ids.astype("int64")) for answer in answers])
        x = hidden_states(self._shape, self._blocks, self._embedding[ids], lengths)
        x = rms_norm(x, torch.ones(x.shape[-1]), self._shape.norm_epsilon)
        return [torch.cat([torch.zeros(1, x.shape[-1]), each[:-1]]).bfloat16() for each in x.split(lengths)]


class Reader:
    """The drafter, and the map of the states."""

    def __init__(self, teacher: Teacher, target: str) -> None:
        beginning = Beginning.read(target)
        ids = read_head_ids(beginning.folder, beginning.info).long()
        self.student = Student(
            teacher.config,
            teacher.state,
            layers=beginning.info.layers,
            head_ids=ids,
            rank=beginning.rank,
            alpha=beginning.alpha,
            train_head=beginning.train_head,
        )
        self.student.load(beginning.folder)
        self.map = torch.zeros(teacher.config.hidden_size, teacher.config.hidden_size, requires_grad=True)
        self.trimmer = Trimmer(ids.numpy(), teacher.config.vocab_size)

    def train(self, answers: Sequence[Answer], states: Sequence[torch.Tensor], options: argparse.Namespace) -> None:
        optimizer, adam = Optimizer(self.student, "muon"), torch.optim.AdamW([self.map], weight_decay=0.0)
        chance, trained, step = random.Random(0), 0, 0
        order = list(range(len(answers)))
        with Progress(console=Console(stderr=True)) as shown:
            task = shown.add_task("training", total=options.tokens)
            while trained < options.tokens:
                chosen = chance.sample(order, k=8)
                batch = self.trimmer.batch([answers[index] for index in chosen])
                known = torch.cat([states[index].float() * _some(len(states[index]), chance) for index in chosen])
                weights = self.student.step_weights()
                hidden = weights.hidden(batch.ids, batch.lengths, batch.rows, known @ self.map.t())
                loss = head_loss(hidden, weights.head, batch.token_ids, batch.target_probs, batch.kept_probability)
                loss.backward()
                positions = max(1.0, float(batch.kept_probability.sum()))
                weights.backward(positions)
                assert self.map.grad is not None
                self.map.grad /= positions
                factor = schedule(trained, options.tokens, 0.9, step)
                optimizer.step(options.learning_rate * factor, options.head_learning_rate * factor)
                adam.param_groups[0]["lr"] = options.map_learning_rate * factor
                adam.step()
                adam.zero_grad()
                trained, step = trained + len(batch.ids), step + 1
                shown.update(task, completed=trained)

    @torch.no_grad()
    def agreement(
        self, answers: Sequence[Answer], states: Sequence[torch.Tensor], stride: int
    ) -> dict[str, list[float]]:
        """By kind of text, and for all: agreement of the first to the fourth draft after every `stride`-th token."""
        weights = self.student.step_weights()
        right: dict[str, list[int]] = {}
        total: dict[str, int] = {}
        for answer, state in zip(answers, states, strict=True):
            mine = self.trimmer.batch([answer])
            last = len(answer.token_ids) - 1 - WINDOW
            for verified in range(answer.prompt_length - 1, last, stride):
                ids = mine.ids[: verified + WINDOW]
                known = state[: len(ids)].float()
                known[verified + 1 :] = 0
                rows = torch.arange(verified, verified + WINDOW)
                hidden = weights.hidden(ids, (len(ids),), rows, known @ self.map.t())
                picks = (hidden @ weights.head.t()).argmax(-1)
                first = verified - (answer.prompt_length - 1)
                agreed = (picks == mine.best[first : first + WINDOW]).int().tolist()
                for kind in (str(answer.meta["kind"]), "all"):
                    before = right.setdefault(kind, [0] * WINDOW)
                    right[kind] = [a + b for a, b in zip(before, agreed, strict=True)]
                    total[kind] = total.get(kind, 0) + 1
        return {kind: [count / total[kind] for count in counts] for kind, counts in right.items()}


def _some(length: int, chance: random.Random) -> torch.Tensor:
    """1 where a state is known, else 0, [length, 1]."""
    known: list[float] = []
    while len(known) < length:
        known += [1.0] * (1 + int(chance.expovariate(1 / (KEPT_RUN - 1)))) + [0.0] * chance.randint(1, WINDOW - 1)
    return torch.tensor(known[:length])[:, None]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="one with a shipped drafter")
    parser.add_argument("--answers", type=Path, required=True, help="folder of `autopipe drafts answers`")
    parser.add_argument("--tokens", type=int, default=200_000, help="to train on, repeats counted")
    parser.add_argument("--pool", type=int, default=100_000, help="tokens of answers whose states are computed")
    parser.add_argument("--heldout-tokens", type=int, default=5_000)
    parser.add_argument("--stride", type=int, default=8, help="tokens from one verified text to the next")
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--head-learning-rate", type=float, default=0.0003)
    parser.add_argument("--map-learning-rate", type=float, default=0.002)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args()


def main() -> None:
    options, started = parse(), time.monotonic()
    teacher = Teacher(options.target)
    heldout = heldout_sample(AnswerPool(options.answers, "heldout", max_length=512).answers, options.heldout_tokens)
    pool: list[Answer] = []
    answers = AnswerPool(options.answers, "train", max_length=512).answers
    random.Random(0).shuffle(answers)
    while answers and sum(len(answer.token_ids) for answer in pool) < options.pool:
        pool.append(answers.pop())
    states: list[torch.Tensor] = []
    with Progress(console=Console(stderr=True)) as shown:
        for group in shown.track(list(grouped([*pool, *heldout], 2048)), description="the target's states"):
            states += teacher.states(group)
    reader = Reader(teacher, options.target)
    before = reader.agreement(heldout, states[len(pool) :], options.stride)
    reader.train(pool, states[: len(pool)], options)
    after = reader.agreement(heldout, states[len(pool) :], options.stride)
    minutes = (time.monotonic() - started) / 60
    if options.json:
        print(json.dumps({"before": before, "after": after, "minutes": minutes}))
        return
    table = Table("held-out", "drafter", *(f"draft {place + 1}" for place in range(WINDOW)))
    for kind in sorted(before):
        table.add_row(kind, "as it is", *(f"{share:.3f}" for share in before[kind]))
        table.add_row(kind, "reading states", *(f"{share:.3f}" for share in after[kind]))
    Console().print(table)
    print(f"{minutes:.0f} minutes")


if __name__ == "__main__":
    main()
