"""Finds and loads the native library; says why when there is none."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ABI_VERSION = 6
"""Raised with every change of the C interface; a library built from older sources is not used."""

DISABLE_VARIABLE = "AUTOPIPE_NO_KERNELS"
"""Set to 1 to run without the native library, as on a machine without a compiler."""

ISA_VARIABLE = "AUTOPIPE_ISA"
"""Set to one of `INSTRUCTION_SETS` to use it; default: the fastest one the CPU has."""

INSTRUCTION_SETS = ("avx512bf16", "avx512", "avx2")
"""The index + 1 is the number the C interface uses; 0 is none."""

_logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason; logged once because cached."""
    library, reason = _try_load()
    if library is None:
        _logger.warning("native CPU kernels not used, falling back to torch: %s", reason)
    return library, reason


def _try_load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get(DISABLE_VARIABLE, "") not in ("", "0"):
        return None, f"switched off by {DISABLE_VARIABLE}"
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_native{suffix}"
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
            version = int(library.autopipe_abi_version())
        except (OSError, AttributeError) as error:
            return None, f"{path.name} cannot be loaded ({error}); reinstall autopipe-llm to rebuild it"
        if version != ABI_VERSION:
            return None, f"{path.name} is of another version ({version}, not {ABI_VERSION}); reinstall autopipe-llm"
        return library, ""
    return None, "they were not built (no C++ compiler at install?); reinstall autopipe-llm with a compiler"


def library() -> ctypes.CDLL | None:
    """The native library, or None when it is missing. It may hold kernels this CPU cannot run: see `has_kernels`."""
    return _load()[0]


def available_instruction_sets() -> tuple[str, ...]:
    """Those of `INSTRUCTION_SETS` that this CPU can run; empty without the library."""
    native = library()
    if native is None:
        return ()
    return tuple(name for index, name in enumerate(INSTRUCTION_SETS) if native.autopipe_cpu_has(index + 1))


def instruction_set() -> str | None:
    """The instruction set the kernels will use on this CPU, or None when there is none they can use.

    `AUTOPIPE_ISA` asks for a set; one the CPU lacks gives None.
    """
    native = library()
    if native is None:
        return None
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted:
        return wanted if wanted in available_instruction_sets() else None
    best = int(native.autopipe_best_isa())
    return INSTRUCTION_SETS[best - 1] if best else None


def has_kernels() -> bool:
    """Whether the matmul, attention and forward kernels can run here."""
    return instruction_set() is not None


def reason_missing() -> str:
    """Why `has_kernels` is false, in words; empty when it is true."""
    native, reason = _load()
    if native is None:
        return reason
    if instruction_set() is None:
        wanted = os.environ.get(ISA_VARIABLE)
        if wanted:
            return f"{ISA_VARIABLE}={wanted}: not one of {', '.join(INSTRUCTION_SETS)}, or this CPU lacks it"
        return "this CPU has neither AVX-512 nor AVX2 with FMA"
    return ""
