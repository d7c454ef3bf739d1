"""Many sequences in one forward of the fused backend.

One pass over the weights serves the rows of all sequences, so eight rows of eight sequences cost little more than one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from autopipe.core.backends.batch import BatchRunner
from autopipe.core.backends.fused_config import reason_unfit, shape_of
from autopipe.core.errors import ConfigError, UnsupportedModelError
from autopipe.core.kernels import has_kernels, reason_missing
from autopipe.core.kernels.formats import WeightFormat

_logger = logging.getLogger(__name__)


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
