"""Answers of the target as training batches: sequences one after another, soft targets over a trimmed vocabulary."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from autopipe.core.errors import ConfigError
from autopipe.drafts.store import Answer, read_answers, shards


@dataclass(frozen=True)
class Batch:
    """Sequences for one forward.

    Attributes:
        ids: token ids, int64 [n]; lengths: of each sequence.
        rows: the rows of the n whose next token is an answer token, int64 [m].
        token_ids: rows of the trimmed head, most probable token first, int64 [m, 64]; 0 where it is not kept.
        target_probs: fp32 [m, 64], renormalised over the kept tokens; 0 where a token is not kept.
        kept_probability: the target's probability of all kept tokens, fp32 [m].
        best: row of the trimmed head of the target's most probable token, int64 [m]; -1 where it is not kept.
    """

    ids: torch.Tensor
    lengths: tuple[int, ...]
    rows: torch.Tensor
    token_ids: torch.Tensor
    target_probs: torch.Tensor
    kept_probability: torch.Tensor
    best: torch.Tensor


class AnswerPool:
    """The answers of a folder, read again when more have been written.

    Args:
        folder: made by `autopipe drafts answers`.
        split: `train` or `heldout`.
        kinds: only of these kinds; None: all.
        max_length: longer sequences are cut at their end; those with no answer left are left out.

    Raises:
        ConfigError: it is no folder of answers.
    """

    def __init__(
        self, folder: Path, split: str, *, kinds: Collection[str] | None = None, max_length: int = 1024
    ) -> None:
        self._folder, self._split, self._kinds, self._max_length = folder, split, kinds, max_length
        self.num_shards = 0
        self.answers: list[Answer] = []
        self.reload()

    def reload(self, num_shards: int | None = None) -> None:
        """Read the complete shards, or the first so many of them."""
        found = len(shards(self._folder))
        wanted = found if num_shards is None else min(num_shards, found)
        if wanted == self.num_shards:
            return
        read = read_answers(self._folder, split=self._split, kinds=self._kinds, num_shards=wanted, key="--answers")
        self.answers = [cut for answer in read if (cut := _cut(answer, self._max_length)) is not None]
        self.num_shards = wanted

    @property
    def num_tokens(self) -> int:
        """Prompt and answer tokens."""
        return sum(len(answer.token_ids) for answer in self.answers)


def _cut(answer: Answer, max_length: int) -> Answer | None:
    room = max_length - answer.prompt_length
    if room <= 0 or not answer.num_answer_tokens:
        return None
    return Answer(
        answer.meta,
        answer.token_ids[:max_length],
        answer.prompt_length,
        answer.top_ids[:room],
        answer.top_logprobs[:room],
    )


def frequent_tokens(
    answers: Iterable[Answer], size: int, vocab_size: int, always: Sequence[int] = ()
) -> npt.NDArray[np.int64]:
    """Ids of the tokens the target expects most often, ascending: the rows of a trimmed head.

    A token counts with its probability at every position, so rare tokens are ranked by more than chance sightings.

    Args:
        size: how many; at most vocab_size.
        always: ids that are kept in any case (ends of text).
    """
    expected = np.zeros(vocab_size)
    for answer in answers:
        probabilities = np.exp(answer.top_logprobs.astype(np.float64))
        expected += np.bincount(answer.top_ids.ravel(), weights=probabilities.ravel(), minlength=vocab_size)
    expected[list(always)] = np.inf
    return np.sort(np.argsort(-expected, kind="stable")[: min(size, vocab_size)]).astype(np.int64)


class Trimmer:
    """Turns answers into batches over a trimmed vocabulary.

    Args:
        head_ids: token id of every row of the trimmed head, [head].
        sharpness: target probabilities are raised to this power before they are renormalised; 1: as they are.
    """

    def __init__(self, head_ids: npt.NDArray[np.int64], vocab_size: int, sharpness: float = 1.0) -> None:
        self._rows = np.full(vocab_size, -1, dtype=np.int64)
        self._rows[head_ids] = np.arange(len(head_ids))
        self._sharpness = sharpness

    def batch(self, answers: Sequence[Answer]) -> Batch:
        lengths = tuple(len(answer.token_ids) for answer in answers)
        starts = np.cumsum((0, *lengths[:-1]))
        rows = [
            np.arange(start + answer.prompt_length - 1, start + len(answer.token_ids) - 1)
            for start, answer in zip(starts, answers, strict=True)
        ]
        head_rows = self._rows[np.concatenate([answer.top_ids for answer in answers])]
        logprobs = np.concatenate([answer.top_logprobs for answer in answers]).astype(np.float32)
        kept = head_rows >= 0
        kept_probability = np.where(kept, np.exp(logprobs), 0.0).sum(1).clip(0.0, 1.0)
        probs = np.where(kept, np.exp(logprobs * self._sharpness), 0.0)
        probs /= np.maximum(probs.sum(1, keepdims=True), 1e-12)
        return Batch(
            ids=torch.from_numpy(np.concatenate([answer.token_ids for answer in answers]).astype(np.int64)),
            lengths=lengths,
            rows=torch.from_numpy(np.concatenate(rows)),
            token_ids=torch.from_numpy(np.maximum(head_rows, 0)),
            target_probs=torch.from_numpy(probs.astype(np.float32)),
            kept_probability=torch.from_numpy(kept_probability.astype(np.float32)),
            best=torch.from_numpy(head_rows[:, 0].copy()),
        )


def grouped(answers: Iterable[Answer], max_tokens: int) -> Iterator[list[Answer]]:
    """Answers in the order given, in groups of at most `max_tokens` tokens (a longer one makes a group alone)."""
    group: list[Answer] = []
    tokens = 0
    for answer in answers:
        length = len(answer.token_ids)
        if group and tokens + length > max_tokens:
            yield group
            group, tokens = [], 0
        group.append(answer)
        tokens += length
    if group:
        yield group


def heldout_sample(answers: list[Answer], num_tokens: int) -> list[Answer]:
    """Greedy answers of each kind by turns, until there are so many answer tokens."""
    greedy = [answer for answer in answers if answer.meta.get("sampling", "greedy") == "greedy"] or answers
    chosen: list[Answer] = []
    left = num_tokens
    for answer in _by_turns(greedy):
        if left <= 0:
            break
        chosen.append(answer)
        left -= answer.num_answer_tokens
    if not chosen:
        raise ConfigError("--answers", "no held-out answers", "a folder with answers of the split `heldout`")
    return chosen


def _by_turns(answers: list[Answer]) -> Iterator[Answer]:
    kinds: dict[str, list[Answer]] = {}
    for answer in answers:
        kinds.setdefault(str(answer.meta["kind"]), []).append(answer)
    queues = [kinds[kind][::-1] for kind in sorted(kinds)]
    while any(queues):
        for queue in queues:
            if queue:
                yield queue.pop()


class Feed:
    """Groups of answers, shuffled anew in every epoch, from a pool that may grow between epochs.

    Attributes:
        epoch, position: which group is next; with `num_shards` the whole state of the feed.
    """

    def __init__(self, pool: AnswerPool, group_tokens: int, seed: int) -> None:
        self._pool, self._group_tokens, self._seed = pool, group_tokens, seed
        self.epoch = self.position = 0
        self._shuffle()

    @property
    def num_shards(self) -> int:
        return self._pool.num_shards

    def restore(self, epoch: int, position: int, num_shards: int) -> None:
        """Go on where a feed with this state was."""
        self._pool.reload(num_shards)
        if self._pool.num_shards != num_shards:
            raise ConfigError("--answers", self._pool.num_shards, f"the folder used before, with {num_shards} shards")
        self.epoch, self.position = epoch, position
        self._shuffle()

    def next(self) -> list[Answer]:
        if self.position >= len(self._groups):
            self._pool.reload()
            self.epoch, self.position = self.epoch + 1, 0
            self._shuffle()
        self.position += 1
        return self._groups[self.position - 1]

    def _shuffle(self) -> None:
        if not self._pool.answers:
            raise ConfigError("--answers", "no answers", "a folder with answers to train on (split `train`)")
        order = list(range(len(self._pool.answers)))
        random.Random(f"{self._seed}-{self.epoch}").shuffle(order)
        self._groups = list(grouped((self._pool.answers[index] for index in order), self._group_tokens))
