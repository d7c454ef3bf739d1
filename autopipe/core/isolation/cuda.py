"""Isolation on a CUDA device: stream priority and pinned token rings. Not yet run on a GPU."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from autopipe.core.plan import StreamPriority

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context


def use_stream(device: str, priority: StreamPriority) -> str | None:
    """Run what this thread computes on `device` from now on in a stream of its own, of this priority.

    Returns:
        None, or in words why it was not done.
    """
    import torch

    if not torch.cuda.is_available() or not device.startswith("cuda"):
        return f"stream priority {priority.value!r} has no effect on {device}"
    # 0 and a negative number: the lower, the sooner.
    least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # static, typed as a method
    value = greatest if priority is StreamPriority.HIGH else least
    torch.cuda.set_stream(torch.cuda.Stream(torch.device(device), priority=value))  # type: ignore[no-untyped-call]  # untyped in torch
    return None


def pin(array: npt.NDArray[Any], runtime: Any = None) -> str | None:
    """Page-lock the memory of an array in a shared segment, so that a GPU copies from and to it directly.

    Args:
        runtime: the CUDA runtime as `torch.cuda.cudart()` gives it; None: that one.

    Returns:
        None, or in words why it was not done.
    """
    if runtime is None:
        import torch

        if not torch.cuda.is_available():
            return "token rings are not pinned: there is no CUDA device"
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # untyped in torch
    page = 4096
    start = array.ctypes.data // page * page
    size = -(-(array.ctypes.data + array.nbytes - start) // page) * page
    code = int(runtime.cudaHostRegister(start, size, _PORTABLE))
    return None if code == 0 else f"token rings are not pinned: cudaHostRegister gave error {code}"
