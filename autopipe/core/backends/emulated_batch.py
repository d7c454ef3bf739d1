"""Many emulated sequences in one emulated forward, whose time depends on all rows together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopipe.core.backends.batch import BatchRunner, Segment
from autopipe.core.backends.emulated import EmulatedBackend
from autopipe.core.plan import EmulatedStage


class EmulatedBatchRunner(BatchRunner):
    """Each sequence is an `EmulatedBackend` that takes no time; one more takes the time of all rows, and the faults."""

    weight_bytes = 0
    kv_bytes_per_token = 0

    def __init__(self, spec: EmulatedStage, slots: int) -> None:
        super().__init__(slots, spec.vocab_size, spec.max_length)
        self._clock = EmulatedBackend(spec.replace(max_length=1 << 20))
        self._timeless = spec.replace(ms={1: 0.0}, prefill_ms=None, fail_after=None, hang_after=None)
        self._sequences: dict[int, tuple[EmulatedBackend, list[int]]] = {}

    @property
    def description(self) -> str:
        return "emulated"

    def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
        self._clock.forward([0] * sum(len(segment.ids) for segment in segments))
        self._clock.reset()
        return torch.cat([self._logits(segment)[len(segment.ids) - segment.num_logits :] for segment in segments])

    def _logits(self, segment: Segment) -> torch.Tensor:
        backend, held = self._sequences.setdefault(segment.slot, (EmulatedBackend(self._timeless), []))
        held += segment.ids
        return backend.forward(list(segment.ids))

    def _truncate(self, slot: int, length: int) -> None:
        if length == 0:
            self._sequences.pop(slot, None)
        else:
            backend, held = self._sequences[slot]
            backend.rollback(length)
            del held[length:]

    def _copy_prefix(self, source: int, destination: int, length: int) -> None:
        if length:
            self._logits(Segment(destination, self._sequences[source][1][:length], 0))

    def set_threads(self, threads: int) -> None:
        return

    def kv_bytes_in_use(self) -> int:
        return 0

    def close(self) -> None:
        self._sequences.clear()
