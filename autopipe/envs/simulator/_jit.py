"""`jit`: numba's compiler where it is installed, otherwise the plain Python function, said once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_log = logging.getLogger(__name__)

try:
    import numba

    COMPILED = True
except ImportError:
    COMPILED = False
    _log.warning("numba is not installed: the simulator runs uncompiled and slow (extra `sim` has it)")


def jit(function: Function) -> Function:
    """Compile `function` on its first call; it must keep to what numba's nopython mode knows."""
    if not COMPILED:
        return function
    compiled: Function = numba.njit(cache=True)(function)
    return compiled
