"""Measures how fast memory can be read: a forward cannot be faster than its weights divided by this rate."""

from __future__ import annotations

import time

from autopipe.core.errors import AutoPipeError
from autopipe.core.kernels.native import Memory, Team


class StreamingRate:
    """Reads a buffer over and over with a team of threads.

    Args:
        num_bytes: size of the buffer: of the weights compared with, so that caches help both alike.
        threads: threads that read, each its own part.
    """

    def __init__(self, num_bytes: int, threads: int) -> None:
        self._memory = Memory(max(64, num_bytes // 64 * 64))
        self._team = Team(threads)

    def read_once(self) -> float:
        """Seconds to read the buffer once."""
        if not self._memory.address:
            raise AutoPipeError("StreamingRate is closed")
        start_s = time.perf_counter()
        self._team._native.autopipe_read(self._memory.address, self._memory.num_bytes, self._team.handle)
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._team.close()
        self._memory.close()


def streaming_bytes_per_s(num_bytes: int, threads: int, repeats: int = 9) -> float:
    """Median rate of reading `num_bytes` with `threads` threads, in bytes per second."""
    rate = StreamingRate(num_bytes, threads)
    try:
        rate.read_once()
        seconds = sorted(rate.read_once() for _ in range(repeats))
    finally:
        rate.close()
    return num_bytes / seconds[repeats // 2]
