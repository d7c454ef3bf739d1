"""KV pages of many sequences: taken from one bounded pool, shared between sequences that begin alike."""

from __future__ import annotations

from collections.abc import Callable

from autopipe.core.errors import KVMemoryError
from autopipe.core.kernels.native import Memory

_SLAB_BYTES = 16 << 20
"""Memory is taken from the system in slabs of about so much: a page alone would waste the rest of a huge page."""


class PagePool:
    """Pages of one size, counted by reference.

    Args:
        page_bytes: size of a page.
        max_pages: most pages in existence; None: as many as memory holds.
        allocate: makes one slab of so many bytes, e.g. `kernels.native.Memory`.
    """

    def __init__(
        self, page_bytes: int, max_pages: int | None = None, allocate: Callable[[int], Memory] = Memory
    ) -> None:
        self.page_bytes, self.max_pages = page_bytes, max_pages
        self._allocate = allocate
        self._slabs: list[Memory] = []
        self._free: list[int] = []
        self._references: dict[int, int] = {}  # of pages in use, by address

    @property
    def pages_in_use(self) -> int:
        return len(self._references)

    @property
    def free_pages(self) -> int | None:
        """Pages that may still be taken; None: no bound."""
        return None if self.max_pages is None else self.max_pages - self.pages_in_use

    def take(self) -> int:
        """Address of a page with one reference; what it holds is left from earlier use.

        Raises:
            KVMemoryError: the pool is at its bound, or the system has no memory left.
        """
        if self.free_pages == 0:
            raise KVMemoryError(f"all {self.max_pages} KV pages are in use")
        if not self._free:
            self._add_slab()
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _add_slab(self) -> None:
        pages = max(1, _SLAB_BYTES // self.page_bytes)
        if self.max_pages is not None:
            pages = min(pages, self.max_pages - self.pages_in_use)
        try:
            slab = self._allocate(pages * self.page_bytes)
        except MemoryError as error:
            raise KVMemoryError(f"no memory left for {pages} more KV pages") from error
        self._slabs.append(slab)
        self._free.extend(slab.address + index * self.page_bytes for index in reversed(range(pages)))

    def share(self, page: int) -> int:
        """The same page, with one reference more."""
        self._references[page] += 1
        return page

    def is_shared(self, page: int) -> bool:
        return self._references[page] > 1

    def give_back(self, page: int) -> None:
        """Drop one reference; the last one frees the page."""
        left = self._references[page] - 1
        if left:
            self._references[page] = left
        else:
            del self._references[page]
            self._free.append(page)

    def close(self) -> None:
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()
        self._free.clear()
        self._references.clear()
