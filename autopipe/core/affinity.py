"""The cores this process may use, and binding it to some, on platforms that can."""

from __future__ import annotations

import os
from collections.abc import Iterable


def allowed_cores() -> set[int] | None:
    """The cores this process may use; None where the platform does not say (macOS, Windows)."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def core_numbers() -> tuple[int, ...]:
    """The cores this process may use, ascending; all of them where the platform does not say."""
    allowed = allowed_cores()
    return tuple(range(os.cpu_count() or 1)) if allowed is None else tuple(sorted(allowed))


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(core_numbers())


def bind_cores(cores: Iterable[int]) -> str | None:
    """Bind this thread, and those that it starts later, to these cores; returns, in words, why that failed."""
    wanted = sorted(cores)
    if not hasattr(os, "sched_setaffinity"):
        return f"not bound to cores {wanted}: this platform cannot bind a process to cores"
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        return f"not bound to cores {wanted}: {error}"
    return None
