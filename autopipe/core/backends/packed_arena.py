"""Memory that packed weights lie in, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopipe.core.kernels.native import Memory

_ALIGNMENT_BYTES = 64


class Arena:
    """Packed tensors one after another in one allocation: made once to learn the size, once to fill it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.memory: Memory | None = None

    def allocate(self) -> Memory:
        """The memory for all that has been put so far, which then is put once more; its owner closes it."""
        self.memory, self.num_bytes = Memory(self.num_bytes), 0
        return self.memory

    def put(self, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> int:
        """Address of the tensor made by `make`; before `allocate` only its size counts, and it is an offset."""
        return self.fill(shape, dtype, lambda memory: memory.copy_(make().reshape(*shape)))

    def fill(self, shape: Sequence[int], dtype: torch.dtype, write: Callable[[torch.Tensor], object]) -> int:
        """As `put`, of a tensor that `write` fills."""
        offset = self.num_bytes
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        self.num_bytes += size + -size % _ALIGNMENT_BYTES
        if self.memory is None:
            return offset
        write(self.memory.tensor(offset, shape, dtype))
        return self.memory.address + offset
