"""CPU kernels of our own: a small C++ library with a C interface, built at install, loaded with ctypes.

`library()` gives the loaded library or None (with the reason, logged once); callers then take torch instead.
"""

from autopipe.core.kernels.loader import (
    available_instruction_sets,
    has_kernels,
    instruction_set,
    library,
    reason_missing,
)

__all__ = ["available_instruction_sets", "has_kernels", "instruction_set", "library", "reason_missing"]
