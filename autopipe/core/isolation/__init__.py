"""Isolation of stages on one machine: NUMA, and on a CUDA device streams, MPS and pinned rings.

Cores and threads are bound by the stage's process itself (`stage_server.py`). Every part of it returns, in words, why
it could not be had; the request's stats show that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopipe.core.isolation.mps import mps_environment, mps_missing
from autopipe.core.isolation.numa import bind_memory, cores_of, numa_nodes

if TYPE_CHECKING:
    from autopipe.core.board import Slot
    from autopipe.core.plan import StagePlan

__all__ = ["bind_memory", "cores_of", "isolate", "mps_environment", "mps_missing", "numa_nodes"]


def isolate(stage: StagePlan, slot: Slot) -> list[str]:
    """Set this process up as its stage asks, before any weights load.

    Args:
        slot: of the board, that it publishes to.

    Returns:
        What could not be done, in words.
    """
    device = _device(stage)
    reasons = [bind_memory(stage.numa) if stage.numa is not None else None]
    options = stage.cuda
    if options.mps_percent is not None:
        missing = mps_missing() if device.startswith("cuda") else f"it has no effect on {device}"
        reasons.append(f"mps_percent: {missing}" if missing else None)
    if options.stream_priority is not None:
        from autopipe.core.isolation.cuda import use_stream

        reasons.append(use_stream(device, options.stream_priority))
    if options.pinned:
        from autopipe.core.isolation.cuda import pin

        reasons.append(pin(slot.ring))
    return [reason for reason in reasons if reason is not None]


def _device(stage: StagePlan) -> str:
    """Where it will compute, looked up only if anything depends on it."""
    if stage.is_emulated or (stage.cuda.mps_percent is None and stage.cuda.stream_priority is None):
        return "cpu"
    if stage.device != "auto":
        return stage.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
