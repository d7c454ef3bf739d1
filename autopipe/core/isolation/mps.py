"""CUDA MPS: a share of a GPU's multiprocessors for each stage's process.

NVIDIA, Multi-Process Service, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": read by a process when it first uses CUDA, so it is
set in the environment the stage's process is started with. Not yet run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPES = "/tmp/nvidia-mps"


def mps_environment(percent: int | None) -> dict[str, str]:
    """What to start a stage's process with so that it gets `percent` of the multiprocessors; None: all."""
    return {} if percent is None else {PERCENTAGE: str(percent)}


def mps_missing(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why a percentage has no effect here, in words; None: the MPS daemon runs."""
    folder = Path(environment.get(_PIPES) or _DEFAULT_PIPES)
    if (folder / "control").exists():
        return None
    return f"no MPS daemon (no {folder}/control): start one with `nvidia-cuda-mps-control -d`"
