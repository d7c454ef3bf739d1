"""What this machine has: for `autopipe doctor`, and beside measured figures. A missing figure is None."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from autopipe.core.affinity import usable_cores

LIBRARIES = (
    "torch",
    "transformers",
    "safetensors",
    "gguf",
    "numpy",
    "pydantic",
    "peft",
    "optuna",
    "gymnasium",
    "stable-baselines3",
    "llama-cpp-python",
    "openvino-genai",
)
"""Distributions whose versions matter to results."""

CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
"""Features that kernels choose by, as Linux spells them."""


def describe_machine() -> dict[str, Any]:
    """Cores, memory, GPUs and library versions, as JSON-ready values."""
    import psutil

    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_features": cpu_features(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
        "gpus": gpus()[0],
        "libraries": library_versions(),
    }


def cpu_name() -> str | None:
    """The processor's name, if the system tells."""
    return _cpu_field("model name") or platform.processor() or None


def cpu_features() -> list[str] | None:
    """Which of `CPU_FEATURES` this CPU has; None where the system does not tell."""
    flags = _cpu_field("flags") or _cpu_field("Features")
    if flags is None:
        return None
    present = set(flags.split())
    return [feature for feature in CPU_FEATURES if feature in present]


def library_versions() -> dict[str, str | None]:
    """Version of each of `LIBRARIES`; None if it is not installed."""
    versions: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def gpus() -> tuple[list[dict[str, Any]], str | None]:
    """NVIDIA GPUs, in NVML's order, and why there are none. One GPU that fails does not hide the others."""
    try:
        import pynvml
    except ImportError:
        return [], "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"no NVIDIA driver ({error})"
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())], None
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"index": index, "name": None, "memory_bytes": None, "error": None}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        figures["name"] = pynvml.nvmlDeviceGetName(handle)
        figures["memory_bytes"] = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    except pynvml.NVMLError as error:
        figures["error"] = str(error)
    return figures


def _cpu_field(name: str) -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
