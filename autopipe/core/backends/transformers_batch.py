"""Many sequences on one model of the transformers backend, each with a cache of its own.

Rows of several go through the model together where that changes no bit (`transformers_stack.py`), else they take
turns. A prompt is computed by itself, as in plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from autopipe.core.backends.batch import Pass, Segment, TurnsBatchRunner
from autopipe.core.backends.transformers import MOST_ROWS, TransformersBackend
from autopipe.core.backends.transformers_cache import GROWTH, HeldSequence, grown
from autopipe.core.backends.transformers_stack import Part, forward_stacked, reason_unstackable, split
from autopipe.core.errors import KVMemoryError, UnsupportedModelError


class TransformersBatchRunner(TurnsBatchRunner):
    """Each sequence gets what it would get alone.

    Args:
        backend: used by nobody else.
        slots: sequences; an unused one costs nothing.
        max_length: longest sequence in tokens.
        kv_bytes: most memory of all KV caches, unless one alone takes more; None: no bound.
        drafts: nobody needs its bits, so texts are read in the fastest way.
    """

    whole_prompts = True
    page_tokens = GROWTH

    def __init__(
        self,
        backend: TransformersBackend,
        slots: int,
        max_length: int,
        kv_bytes: int | None = None,
        *,
        drafts: bool = False,
    ) -> None:
        super().__init__(slots, backend.vocab_size, max_length)
        self.exact = backend.exact
        self._backend, self._kv_bytes, self._drafts = backend, kv_bytes, drafts
        self._held: dict[int, HeldSequence] = {}
        notes = backend.cost_notes()
        self._apart = reason_unstackable(backend)
        self.one_by_one = self._apart is not None
        self.weight_bytes, self.kv_bytes_per_token = notes.weight_bytes or 0, notes.kv_bytes_per_token or 0

    @property
    def description(self) -> str:
        if self._apart is None:
            return "rows of all sequences in one pass, prompts one after another"
        return f"one sequence after another, since together {self._apart}"

    def set_threads(self, threads: int) -> None:
        self._backend.set_threads(threads)

    def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
        self._require_memory(segments)
        self._backend.use_threads()
        try:
            return super()._run(segments) if self.one_by_one else self._run_stacked(segments)
        except BaseException:
            for segment in segments:
                if segment.slot in self._held:
                    self._truncate(segment.slot, self._lengths[segment.slot])
            raise

    def _run_stacked(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Prompts one by one, and all other rows together."""
        found: dict[int, torch.Tensor] = {}
        parts: dict[int, Part] = {}
        for segment in segments:
            length = self._lengths[segment.slot]
            if length and segment.num_logits and len(segment.ids) <= MOST_ROWS:
                parts[segment.slot] = Part(self._held[segment.slot], segment.ids)
            else:
                found[segment.slot] = self._timed(segment, length)
        slots = iter(parts)
        for group in split(list(parts.values())):
            start = time.monotonic_ns()
            rows = forward_stacked(self._backend, group)
            self.passes.append(Pass(len(rows), max(1, time.monotonic_ns() - start)))
            end = 0
            for part in group:
                begin, end = end, end + len(part.ids)
                found[next(slots)] = rows[begin:end]
        logits = [found[segment.slot] for segment in segments]
        return torch.cat(
            [torch.empty(0, self.vocab_size, dtype=torch.float32)]
            + [rows[len(rows) - each.num_logits :] for rows, each in zip(logits, segments, strict=True)]
        )

    def _run_one(self, segment: Segment, length: int) -> torch.Tensor:
        backend = self._at(segment.slot)
        if (length == 0 and segment.num_logits <= 1) or (self._drafts and segment.num_logits == 0):
            return backend.prefill(segment.ids)[None][: segment.num_logits]
        return backend.forward(segment.ids)[len(segment.ids) - segment.num_logits :]

    def _at(self, slot: int) -> TransformersBackend:
        """The backend, at a slot's sequence."""
        if slot not in self._held:
            self._held[slot] = self._backend.new_sequence()
        self._backend.sequence = self._held[slot]
        return self._backend

    def _require_memory(self, segments: Sequence[Segment]) -> None:
        """Raises KVMemoryError where the sequences would outgrow the memory."""
        if self._kv_bytes is None:
            return
        tokens = {slot: held.capacity for slot, held in self._held.items()}
        for segment in segments:
            last = self._lengths[segment.slot] + len(segment.ids) - 1
            needed = self._backend.grid.num_keys(last)  # in the layouts that take most
            tokens[segment.slot] = grown(tokens.get(segment.slot, 0), needed)
        if len(tokens) > 1 and sum(tokens.values()) * self.kv_bytes_per_token > self._kv_bytes:
            raise KVMemoryError(f"{self.kv_bytes_in_use()} of {self._kv_bytes} bytes of KV memory are in use")

    def _truncate(self, slot: int, length: int) -> None:
        if length == 0:
            held = self._held.pop(slot, None)
            if held is not None and held.ids is self._backend.sequence.ids:
                self._backend.sequence = self._backend.new_sequence()
        else:
            self._at(slot).rollback(length)

    def _copy_prefix(self, source: int, destination: int, length: int) -> None:
        if length:
            raise UnsupportedModelError("a prompt is computed whole; nothing of it is taken from another sequence")

    @property
    def capacity_tokens(self) -> int | None:
        return None if not self._kv_bytes or not self.kv_bytes_per_token else self._kv_bytes // self.kv_bytes_per_token

    def free_tokens(self) -> int | None:
        capacity = self.capacity_tokens
        return None if capacity is None else max(0, capacity - self._tokens_in_use)

    @property
    def _tokens_in_use(self) -> int:
        return sum(held.capacity for held in list(self._held.values()))  # asked from other threads, too

    def kv_bytes_in_use(self) -> int:
        return self._tokens_in_use * self.kv_bytes_per_token

    def close(self) -> None:
        self._held.clear()
        self._backend.close()
