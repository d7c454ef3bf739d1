"""A drafter of the target's own layers and an adapter, for many sequences at a time: `shared_base` in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopipe.core.backends.base import best_ids
from autopipe.core.backends.batch import Segment
from autopipe.core.backends.fused_batch_native import NativeBatchRunner
from autopipe.core.backends.fused_config import shape_of
from autopipe.core.backends.shared_base import Drafter, input_embedding, reason_unfit_drafter
from autopipe.core.errors import UnsupportedModelError


class SharedBaseBatchRunner(NativeBatchRunner):
    """Logits have the target's whole vocabulary; tokens that the drafter's head lacks have -inf.

    Args:
        config: of the target.
        load: gives the target's weights by name, mapped from disk if possible; called twice.
        adapter: the drafter's folder.
        dtype: torch.bfloat16 or torch.float32.
        threads, slots, max_length, kv_bytes: as of `batch_runner`.

    Raises:
        UnsupportedModelError, ConfigError, ModelLoadError: as `SharedBaseBackend`.
    """

    def __init__(
        self,
        config: Any,
        load: Callable[[], Mapping[str, torch.Tensor]],
        adapter: str,
        *,
        dtype: torch.dtype,
        threads: int | None,
        slots: int,
        max_length: int,
        kv_bytes: int | None = None,
    ) -> None:
        reason = reason_unfit_drafter(config, "cpu")
        if reason is not None:
            raise UnsupportedModelError(reason)
        shape = shape_of(config)
        self._embedding = input_embedding(load(), shape, dtype)  # which the kernels read
        drafter = Drafter.load(config, load(), adapter, dtype, self._embedding)
        self._head_ids = drafter.head_ids
        self._whole = torch.empty(0, shape.vocab, dtype=torch.float32)
        self._run_on(drafter.weights, threads, slots, shape.vocab, max_length, kv_bytes)

    @property
    def description(self) -> str:
        return f"{super().description}, head of {len(self._head_ids)} tokens"

    def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
        logits = super()._run(segments)
        if self._whole.shape[0] < len(logits):
            self._whole = torch.full((len(logits), self.vocab_size), -torch.inf, dtype=torch.float32)
        whole = self._whole[: len(logits)]
        # By numpy: torch would wake its threads, which then spin beside those of the kernels.
        whole.numpy()[:, self._head_ids.numpy()] = logits.numpy()
        return whole

    def _run_best(self, segments: Sequence[Segment]) -> list[int]:
        # Rows of the head, whose ids ascend. Without a screen the runner below would look for ids in `_run`'s own.
        has_screen = self._weights.has_screen
        rows = super()._run_best(segments) if has_screen else best_ids(super()._run(segments))
        return [int(self._head_ids[row]) if row >= 0 else -1 for row in rows]
