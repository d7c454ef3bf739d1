"""Many sequences on one model, each with its own KV cache: the contract of the shared pipeline with a model.

A row's logits are bitwise the same whatever else is computed beside it, and however its sequence's tokens were
grouped into calls: a sequence never notices its company. (Of a model that reads prompts whole, see `whole_prompts`,
this holds for what follows the prompt.)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from autopipe.core.backends.base import best_ids
from autopipe.core.errors import ConfigError, ContextLengthError, RollbackError


class Pass(NamedTuple):
    """One pass over the weights: rows it computed, and how long it took."""

    num_rows: int
    nanoseconds: int


class Segment(NamedTuple):
    """Tokens to append to one sequence; logits are wanted after the last `num_logits` of them (0 to all)."""

    slot: int
    ids: Sequence[int]
    num_logits: int


class BatchRunner(ABC):
    """A decoder and the KV caches of `slots` sequences, numbered from 0. For one thread.

    Attributes:
        exact: whether what is said of rows in the module holds.
        one_by_one: sequences take turns: a forward of several is one of each, and takes as long.
        whole_prompts: the first tokens of an empty slot, where logits are wanted of the last at most, are computed as a
            prompt, which rounds in its own way: it is to be given whole, and no part of it taken from another sequence.
        passes: what the last forward was made of; where sequences share it, one.
        max_length: longest sequence in tokens.
        vocab_size: rows of the output head.
        weight_bytes: read by one forward, whatever the number of rows.
        kv_bytes_per_token: of one sequence.
        page_tokens: the step in which a sequence's memory grows; 1 where there are no pages.
        shortfalls: what could not be had as asked, in words.
    """

    exact: bool = True
    one_by_one: bool = False
    whole_prompts: bool = False
    weight_bytes: int
    kv_bytes_per_token: int
    page_tokens: int = 1
    shortfalls: tuple[str, ...] = ()

    def __init__(self, slots: int, vocab_size: int, max_length: int) -> None:
        self.slots, self.vocab_size, self.max_length = slots, vocab_size, max_length
        self.passes: list[Pass] = []
        self._lengths = [0] * slots

    @property
    @abstractmethod
    def description(self) -> str:
        """What computes, in words."""

    def length(self, slot: int) -> int:
        """Tokens in a slot's cache."""
        return self._lengths[self._checked(slot)]

    def forward(self, segments: Sequence[tuple[int, Sequence[int], int]]) -> torch.Tensor:
        """Append tokens to sequences.

        Args:
            segments: (slot, ids, num_logits) each, or `Segment`s: ids go to the end of the slot's sequence; logits are
                wanted after the last num_logits of them (0 while a prompt is read). Each slot at most once.

        Returns:
            fp32 [sum of num_logits, vocab_size], the segments' rows in order; valid until the next call.

        Raises:
            ConfigError: no segment, an unknown slot or one given twice, no ids, an id outside the vocabulary, or
                num_logits beyond the ids. No cache is changed.
            ContextLengthError: a sequence would exceed max_length. No cache is changed.
            KVMemoryError: no room for the new tokens' keys and values. No sequence has grown.
        """
        checked = self._checked_segments(segments)
        self.passes, start = [], time.monotonic_ns()
        logits = self._run(checked)
        self._grow(checked, start)
        return logits

    def best(self, segments: Sequence[tuple[int, Sequence[int], int]]) -> list[int]:
        """As `forward`, but of each row of logits only the lowest id of the largest; -1: there is none above -inf."""
        checked = self._checked_segments(segments)
        self.passes, start = [], time.monotonic_ns()
        found = self._run_best(checked)
        self._grow(checked, start)
        return found

    def prepare_best(self) -> None:  # noqa: B027 - optional hook
        """Make `best` as fast as it can be; may take a second and some memory."""

    def rollback(self, slot: int, length: int) -> None:
        """Forget a sequence's tokens at positions >= length.

        Raises:
            RollbackError: length is negative or beyond the sequence.
        """
        held = self.length(slot)
        if not 0 <= length <= held:
            raise RollbackError(f"cannot roll slot {slot} back to {length}; it holds {held} tokens")
        self._truncate(slot, length)
        self._lengths[slot] = length

    def reset(self, slot: int) -> None:
        """Forget a sequence and give its memory back."""
        self.rollback(slot, 0)

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Make the first `length` tokens of a sequence those of another slot, whose own are forgotten.

        Raises:
            ConfigError: the slots are the same or unknown, or the source is shorter. Nothing is changed.
            KVMemoryError: no room; the destination is empty then.
        """
        if source == destination:
            raise ConfigError("destination", destination, "another slot than the source")
        if not 0 <= length <= self.length(source):
            raise ConfigError("length", length, f"0 to the {self.length(source)} tokens of slot {source}")
        self.reset(destination)
        self._copy_prefix(source, destination, length)
        self._lengths[destination] = length

    @abstractmethod
    def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
        """`forward` with checked segments; must leave every sequence usable when it raises."""

    def _run_best(self, segments: Sequence[Segment]) -> list[int]:
        return best_ids(self._run(segments))

    @abstractmethod
    def _truncate(self, slot: int, length: int) -> None: ...

    @abstractmethod
    def _copy_prefix(self, source: int, destination: int, length: int) -> None: ...

    @abstractmethod
    def set_threads(self, threads: int) -> None:
        """Compute with so many threads from the next call on; results do not change."""

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens that all sequences may have together; None: no bound."""
        return None

    def free_tokens(self) -> int | None:
        """Tokens for which free pages are left, partly filled ones not counted; None: no bound."""
        return None

    @abstractmethod
    def kv_bytes_in_use(self) -> int:
        """Memory that sequences hold; shared pages count once."""

    @abstractmethod
    def close(self) -> None:
        """Free weights and caches; the runner is not used afterwards."""

    def _checked_segments(self, segments: Sequence[tuple[int, Sequence[int], int]]) -> list[Segment]:
        checked = [self._checked_segment(Segment(*segment)) for segment in segments]
        if not checked or len({segment.slot for segment in checked}) < len(checked):
            raise ConfigError("segments", [segment.slot for segment in checked], "one or more different slots")
        return checked

    def _grow(self, segments: Sequence[Segment], start_ns: int) -> None:
        for segment in segments:
            self._lengths[segment.slot] += len(segment.ids)
        if not self.passes:
            num_rows = sum(len(segment.ids) for segment in segments)
            self.passes = [Pass(num_rows, max(1, time.monotonic_ns() - start_ns))]

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise ConfigError("slot", slot, f"0 to {self.slots - 1}")
        return slot

    def _checked_segment(self, segment: Segment) -> Segment:
        slot, ids, num_logits = segment
        length = self.length(slot)
        if not len(ids):
            raise ConfigError("ids", list(ids), "at least one token id")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise ConfigError("ids", wrong, f"0 to {self.vocab_size - 1}")
        if not 0 <= num_logits <= len(ids):
            raise ConfigError("num_logits", num_logits, f"0 to the {len(ids)} ids")
        if length + len(ids) > self.max_length:
            raise ContextLengthError(
                f"slot {slot}: {length} + {len(ids)} tokens exceed the context of {self.max_length}"
            )
        return segment


class TurnsBatchRunner(BatchRunner):
    """Sequences take turns on one copy of the weights."""

    one_by_one = True

    def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
        logits = [self._timed(segment, self._lengths[segment.slot]) for segment in segments]
        return torch.cat([torch.empty(0, self.vocab_size, dtype=torch.float32), *logits])

    def _timed(self, segment: Segment, length: int) -> torch.Tensor:
        start = time.monotonic_ns()
        logits = self._run_one(segment, length)
        self.passes.append(Pass(len(segment.ids), max(1, time.monotonic_ns() - start)))
        return logits

    @abstractmethod
    def _run_one(self, segment: Segment, length: int) -> torch.Tensor:
        """Append a segment to a sequence of this length; fp32 [num_logits, vocab_size]."""
