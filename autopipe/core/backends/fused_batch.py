"""Many sequences in one forward of the fused backend, each with its own KV cache.

One pass over the weights serves the rows of all sequences, so eight rows of eight sequences cost little more than one.
A row's logits are bitwise the same whatever else is computed beside it, and however its sequence's tokens were
grouped into calls: a sequence never notices its company.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autopipe.core.backends.base import best_ids
from autopipe.core.backends.fused_config import reason_unfit, shape_of
from autopipe.core.errors import ConfigError, ContextLengthError, RollbackError, UnsupportedModelError
from autopipe.core.kernels import has_kernels, reason_missing
from autopipe.core.kernels.formats import WeightFormat

_logger = logging.getLogger(__name__)


class Segment(NamedTuple):
    """Tokens to append to one sequence; logits are wanted after the last `num_logits` of them (0 to all)."""

    slot: int
    ids: Sequence[int]
    num_logits: int


class BatchRunner(ABC):
    """A decoder and the KV caches of `slots` sequences, numbered from 0. For one thread.

    Attributes:
        max_length: longest sequence in tokens.
        vocab_size: rows of the output head.
        weight_bytes: read by one forward, whatever the number of rows.
        kv_bytes_per_token: of one sequence.
        page_tokens: the step in which a sequence's memory grows; 1 where there are no pages.
        shortfalls: what could not be had as asked, in words.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    page_tokens: int = 1
    shortfalls: tuple[str, ...] = ()

    def __init__(self, slots: int, vocab_size: int, max_length: int) -> None:
        self.slots, self.vocab_size, self.max_length = slots, vocab_size, max_length
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
        logits = self._run(checked)
        self._grow(checked)
        return logits

    def best(self, segments: Sequence[tuple[int, Sequence[int], int]]) -> list[int]:
        """As `forward`, but of each row of logits only the lowest id of the largest; -1: there is none above -inf."""
        checked = self._checked_segments(segments)
        found = self._run_best(checked)
        self._grow(checked)
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

    def _grow(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._lengths[segment.slot] += len(segment.ids)

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


def batch_runner(
    config: Any,
    state: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    threads: int | None = None,
    slots: int = 8,
    max_length: int | None = None,
    kv_bytes: int | None = None,
    weights: WeightFormat | None = None,
    shared_layers: Collection[int] = (),
) -> BatchRunner:
    """A batch runner for a model of the Llama family: on native kernels, else a slower one in torch, one by one.

    Args:
        config: the model's transformers config.
        state: its state dict, with transformers' names; tensors are copied and may be dropped afterwards.
        dtype: torch.float32 or torch.bfloat16 (on CUDA also torch.float16).
        device: `cpu`, `cuda` or `cuda:N`.
        threads: compute threads on the CPU; None: all cores this process may use.
        slots: sequences; an unused one costs nothing.
        max_length: longest sequence in tokens; None: the model's own limit.
        kv_bytes: most memory of all KV caches; None: no bound.
        weights: INT8 or INT4: quantise the matrices (native kernels only; dtype must be bf16). None: as dtype.
        shared_layers: layers that drafters in other processes are made of (native kernels only); see `PackedDecoder`.

    Raises:
        UnsupportedModelError: the model is not of the family, the state does not match the config, or weights cannot
            be quantised here.
        ConfigError: an argument is out of range.
    """
    from autopipe.core.backends.fused import FusedBackend

    reason = reason_unfit(config, max_length) or FusedBackend.reason_unfit_dtype(dtype, device)
    if reason is None and weights is not None:
        reason = FusedBackend.reason_unfit_quantised(device)
    if reason is not None:
        raise UnsupportedModelError(f"fused backend: {reason}")
    shape = shape_of(config)
    longest = shape.max_positions if max_length is None else max_length
    for key, value, least, most in (
        ("max_length", longest, 1, shape.max_positions),
        ("slots", slots, 1, 1 << 16),
        ("threads", 1 if threads is None else threads, 1, 1024),
    ):
        if not least <= value <= most:
            raise ConfigError(key, value, f"{least} to {most}")
    if device == "cpu" and has_kernels():
        from autopipe.core.backends.fused_batch_native import NativeBatchRunner

        return NativeBatchRunner(
            shape, state, dtype, threads, slots, longest, kv_bytes, weights=weights, shared_layers=shared_layers
        )
    from autopipe.core.backends.fused_batch_torch import TorchBatchRunner

    reason = f"device {device}" if device != "cpu" else reason_missing()
    _logger.warning("sequences run one after another in torch, slower than one batch on native kernels: %s", reason)
    return TorchBatchRunner(shape, state, dtype, device, threads, slots, longest, kv_bytes)
