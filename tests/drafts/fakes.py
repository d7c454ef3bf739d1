"""A target made in code for the answer generator, and a folder of answers made by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from autopipe.drafts.answers import AnswerGenerator
from autopipe.drafts.mix import Job, PromptMix
from autopipe.drafts.overlap import OverlapFilter
from autopipe.drafts.prompt import TrainingPrompt
from autopipe.drafts.store import AnswerStore
from tests.tiny import EOS_ID, TOKENIZER_SIZE, tiny_tokenizer

_VOCAB = tiny_tokenizer().get_vocab()
LETTERS = [_VOCAB[letter] for letter in "abcdefghij"]
HEADER = {"target": "fake", "dtype": "torch.float32", "tokenizer": "0123", "vocab_size": TOKENIZER_SIZE}


class FakeBatch:
    """After a letter it says the next one of the alphabet, from `a` again after `j`; after `.` it ends its text."""

    vocab_size = TOKENIZER_SIZE
    max_length = 400

    def __init__(self, slots: int = 4) -> None:
        self.slots = slots
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.calls: list[int] = []

    def forward(self, segments: Sequence[tuple[int, Sequence[int], int]]) -> torch.Tensor:
        rows = []
        for slot, ids, num_logits in segments:
            self.held[slot] += ids
            rows += [self._row(token) for token in ids[-num_logits:]]
        self.calls.append(sum(len(ids) for _, ids, _ in segments))
        return torch.stack(rows)

    def _row(self, token: int) -> torch.Tensor:
        row = torch.linspace(-1, 0, self.vocab_size)
        row[self.say(token)] = 5.0
        return row

    @staticmethod
    def say(token: int) -> int:
        if token == _VOCAB["."]:
            return EOS_ID
        place = LETTERS.index(token) if token in LETTERS else -1
        return LETTERS[(place + 1) % len(LETTERS)]

    def rollback(self, slot: int, length: int) -> None:
        del self.held[slot][length:]

    def close(self) -> None:
        pass


def prompts(count: int, kind: str = "code", ending: str = "a") -> Iterator[Job]:
    for number in range(count):
        text = f"prompt number {number} {ending}"
        yield TrainingPrompt(key=f"{kind}/{number}", kind=kind, source="test", group=text, text=text)


def generator(
    folder: Path,
    source: Iterator[Job],
    *,
    batch: Any = None,
    protected: Sequence[str] = (),
    shard_tokens: int = 50,
    **options: Any,
) -> AnswerGenerator:
    store = AnswerStore(folder, HEADER, shard_tokens=shard_tokens)
    mix = PromptMix({"code": source}, {"code": 1.0}, {})
    return AnswerGenerator(
        batch or FakeBatch(),
        tiny_tokenizer(),
        [EOS_ID],
        store,
        mix,
        OverlapFilter(protected),
        **{"max_new_tokens": 12, **options},
    )
