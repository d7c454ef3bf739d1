"""Many sequences on one model of the transformers backend: they take turns, each with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopipe.core.backends.batch import Segment, TurnsBatchRunner
from autopipe.core.backends.transformers import TransformersBackend
from autopipe.core.backends.transformers_cache import HeldSequence
from autopipe.core.backends.transformers_layout import KEY_BLOCK
from autopipe.core.errors import KVMemoryError, UnsupportedModelError


class TransformersBatchRunner(TurnsBatchRunner):
    """A backend that changes from sequence to sequence; each gets what it would get alone.

    Args:
        backend: used by nobody else.
        slots: sequences; an unused one costs nothing.
        max_length: longest sequence in tokens.
        kv_bytes: most memory of all KV caches, unless one alone takes more; None: no bound.
    """

    whole_prompts = True

    def __init__(self, backend: TransformersBackend, slots: int, max_length: int, kv_bytes: int | None = None) -> None:
        super().__init__(slots, backend.vocab_size, max_length)
        self.exact = backend.exact
        self._backend, self._kv_bytes = backend, kv_bytes
        self._held: dict[int, HeldSequence] = {}
        notes = backend.cost_notes()
        self.weight_bytes, self.kv_bytes_per_token = notes.weight_bytes or 0, notes.kv_bytes_per_token or 0

    @property
    def description(self) -> str:
        return "one sequence after another"

    def set_threads(self, threads: int) -> None:
        self._backend.set_threads(threads)

    def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
        self._require_memory(segments)
        try:
            return super()._run(segments)
        except BaseException:
            for segment in segments:
                if segment.slot in self._held:
                    self._truncate(segment.slot, self._lengths[segment.slot])
            raise

    def _run_one(self, segment: Segment, length: int) -> torch.Tensor:
        backend = self._at(segment.slot)
        if length == 0 and segment.num_logits <= 1:
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
            have, length = tokens.get(segment.slot, 0), self._lengths[segment.slot] + len(segment.ids)
            needed = (length // KEY_BLOCK + 1) * KEY_BLOCK
            tokens[segment.slot] = have if needed <= have else max(needed, 2 * have)
        if len(tokens) > 1 and sum(tokens.values()) * self.kv_bytes_per_token > self._kv_bytes:
            raise KVMemoryError(f"{self.kv_bytes_in_use()} of {self._kv_bytes} bytes of KV memory are in use")

    def _truncate(self, slot: int, length: int) -> None:
        if length == 0:
            self._held.pop(slot, None)
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
        return sum(held.capacity for held in self._held.values())

    def kv_bytes_in_use(self) -> int:
        return self._tokens_in_use * self.kv_bytes_per_token

    def close(self) -> None:
        self._held.clear()
        self._backend.close()
