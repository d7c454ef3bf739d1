"""The fast path for the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3).

q/k/v and gate/up are one matrix each, the KV cache is allocated in blocks as the sequence grows, and a forward is one
call. On a CPU our own kernels compute it; where they are missing, torch with padded fixed shapes; on CUDA, graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from autopipe.core.backends.base import CostNotes, StageBackend
from autopipe.core.backends.fused_config import DecoderShape, reason_unfit, shape_of
from autopipe.core.backends.fused_runner import Runner
from autopipe.core.errors import ConfigError, ContextLengthError, RollbackError, UnsupportedModelError
from autopipe.core.kernels import has_kernels, reason_missing
from autopipe.core.kernels.formats import WeightFormat

_logger = logging.getLogger(__name__)


class FusedBackend(StageBackend):
    """A stage of the Llama family.

    Args:
        config: the model's transformers config.
        state: its state dict, with transformers' names; tensors are copied and may be dropped afterwards.
        dtype: torch.float32 or torch.bfloat16 (on CUDA also torch.float16): of weights and KV cache.
            Sums, norms and attention are fp32 in all of them.
        device: `cpu`, `cuda` or `cuda:N`.
        threads: compute threads on the CPU; None: all cores this process may use.
        max_length: longest sequence in tokens; None: the model's own limit.
        name: how stats name the stage.
        graphs: on CUDA, replay graphs; false: operation by operation.
        weights: INT8 or INT4: quantise the matrices (CPU kernels only; dtype must be bf16). None: as dtype.
        shared_layers: layers that drafters in other processes are made of (CPU kernels only); see `PackedDecoder`.
        exact: as in a plan; false allows faster shapes where exactness costs something (CUDA, torch fallback).

    Raises:
        UnsupportedModelError: `reason_unfit` gives a reason, or the state does not match the config.
        ConfigError: dtype, device, threads or max_length is not allowed.
    """

    def __init__(
        self,
        config: Any,
        state: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        threads: int | None = None,
        max_length: int | None = None,
        name: str = "fused",
        exact: bool = True,
        graphs: bool = True,
        weights: WeightFormat | None = None,
        shared_layers: Collection[int] = (),
    ) -> None:
        reason = reason_unfit(config, max_length) or self.reason_unfit_dtype(dtype, device)
        if reason is not None:
            raise UnsupportedModelError(f"fused backend: {reason}")
        if weights is not None and (dtype != torch.bfloat16 or (reason := self.reason_unfit_quantised(device))):
            raise UnsupportedModelError(f"fused backend: {reason or 'quantised weights go with dtype bf16'}")
        shape = shape_of(config)
        if max_length is not None and not 1 <= max_length <= shape.max_positions:
            raise ConfigError("max_length", max_length, f"1 to the model's {shape.max_positions}")
        check_threads(threads)
        max_length = max_length or shape.max_positions
        runner = _make_runner(shape, state, dtype, device, threads, max_length, exact, graphs, weights, shared_layers)
        self._begin(runner, shape.vocab, max_length, name)

    def _begin(self, runner: Runner, vocab_size: int, max_length: int, name: str) -> None:
        self.name, self.vocab_size, self.max_length = name, vocab_size, max_length
        self._length = 0
        self._runner = runner
        self.exact = runner.exact

    @staticmethod
    def reason_unfit(config: Any, max_length: int | None = None) -> str | None:
        """Why the model of this config cannot run here; None when it can. A window needs max_length within it."""
        return reason_unfit(config, max_length)

    @staticmethod
    def reason_unfit_dtype(dtype: torch.dtype, device: str = "cpu") -> str | None:
        """Why this dtype cannot run on this device; None when it can."""
        kind = device.split(":")[0]
        allowed = {
            "cpu": (torch.float32, torch.bfloat16),
            "cuda": (torch.float32, torch.bfloat16, torch.float16),
        }.get(kind)
        if allowed is None:
            return f"device {device!r} is not cpu or cuda"
        if dtype not in allowed:
            return f"{dtype} on {kind}: only {', '.join(str(choice) for choice in allowed)}"
        return None

    @staticmethod
    def reason_unfit_quantised(device: str = "cpu") -> str | None:
        """Why weights cannot be quantised here; None when they can."""
        if device.split(":")[0] != "cpu":
            return f"its quantised weights are for CPUs, not {device}"
        return None if has_kernels() else f"quantised weights need the native kernels: {reason_missing()}"

    @property
    def shortfalls(self) -> Sequence[str]:
        return self._runner.shortfalls

    @property
    def length(self) -> int:
        return self._length

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        return self._append(ids, 1)[0]

    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        return self._append(ids, len(ids))

    def best(self, ids: Sequence[int]) -> list[int]:
        self._require_fit(ids)
        found = self._runner.best(ids, self._length, len(ids))
        self._length += len(ids)
        return found

    def prepare_best(self) -> None:
        self._runner.prepare_best()

    def _append(self, ids: Sequence[int], num_logits: int) -> torch.Tensor:
        self._require_fit(ids)
        logits = self._runner.run(ids, self._length, num_logits)
        self._length += len(ids)
        return logits

    def _require_fit(self, ids: Sequence[int]) -> None:
        if not len(ids):
            raise ConfigError("ids", list(ids), "at least one token id")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise ConfigError("ids", wrong, f"0 to {self.vocab_size - 1}")
        if self._length + len(ids) > self.max_length:
            raise ContextLengthError(
                f"{self.name}: {self._length} + {len(ids)} tokens exceed the context of {self.max_length}"
            )

    def rollback(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise RollbackError(f"{self.name}: cannot roll back to {length}; the cache holds {self._length} tokens")
        self._length = length

    def set_threads(self, threads: int) -> None:
        """Compute with so many threads from the next call on; results do not change.

        Raises:
            ConfigError: threads is not 1 or more.
        """
        check_threads(threads)
        self._runner.set_threads(threads)

    def close(self) -> None:
        self._runner.close()

    def cost_notes(self) -> CostNotes:
        return CostNotes(self._runner.weight_bytes, self._runner.kv_bytes_per_token, self._runner.description)


def check_threads(threads: int | None) -> None:
    """Raises ConfigError unless it is a sensible number of compute threads, or None."""
    if threads is not None and not 1 <= threads <= 1024:
        raise ConfigError("threads", threads, "1 to 1024")


def _make_runner(
    shape: DecoderShape,
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: str,
    threads: int | None,
    max_length: int,
    exact: bool,
    graphs: bool,
    weights: WeightFormat | None,
    shared_layers: Collection[int],
) -> Runner:
    if device.startswith("cuda"):
        from autopipe.core.backends.fused_cuda import CudaRunner

        return CudaRunner(shape, state, dtype, device, max_length, exact, graphs)
    if has_kernels():
        from autopipe.core.backends.fused_native import NativeRunner

        return NativeRunner(shape, state, dtype, threads, weights=weights, shared_layers=shared_layers)
    from autopipe.core.backends.fused_torch import TorchRunner

    _logger.warning("fused backend on padded torch shapes, slower than native kernels: %s", reason_missing())
    return TorchRunner(shape, state, dtype, threads, max_length, exact)
