"""Bytes of items in pages of one size, so that items of any size leave no gaps.

Contiguous items are quicker to read, but must be compacted when no gap is large enough. With items
of different sizes that moves 6 to 10 bytes for each byte written (simulated: first fit, sizes from
4,000 to 8,000 bytes or lognormal, 100 to 2,000 items, 2.5% free), and all of the memory at once,
while all processes wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SMALLEST_PAGE, LARGEST_PAGE = 256, 1 << 16
PAGES_AN_ITEM = 128
"""An item of the first one's size takes this many pages; an item wastes half a page on average. All
three are guesses: few pages to follow, but small enough to waste less than 1%."""

HEAD = ("page_bytes", "page_count", "free_first", "free_count", "fresh")
"""Names of the fields in the shared head, all zero at first."""


class Pages:
    """A page allocator over shared memory, with a chain of pages for each item and a free list.

    Args:
        head: a mapping of the names in `HEAD` to integers, shared.
        memory: bytes for pages and links.
    """

    def __init__(self, head: Any, memory: Any) -> None:
        self._head, self._memory = head, memory
        self._next: Any = None
        self._page_bytes = 0

    def forget(self) -> None:
        """Free all pages, and choose the page size anew at the next item."""
        for name in HEAD:
            self._head[name] = 0

    def _follow(self, nbytes: int) -> None:
        """Choose the page size by the first item, or take the one that another process chose."""
        head = self._head
        if self._page_bytes and head["page_bytes"] == self._page_bytes:
            return
        if not head["page_bytes"]:
            parts = max(1, min(nbytes // SMALLEST_PAGE, PAGES_AN_ITEM))
            head["page_bytes"] = min(LARGEST_PAGE, max(64, -(-nbytes // parts)))
            head["page_count"] = self._memory.nbytes // (head["page_bytes"] + 4)
            head["free_first"] = -1
        count, page = int(head["page_count"]), int(head["page_bytes"])
        self._page_bytes = page
        links = self._memory[: count * 4]
        self._next = memoryview(links).cast("i")
        self._pages = self._memory[count * 4 : count * (4 + page)].reshape(count, page)

    def has_room(self, nbytes: int) -> bool:
        """Tell whether enough pages are free for an item."""
        self._follow(nbytes)
        head = self._head
        free = head["free_count"] + head["page_count"] - head["fresh"]
        return bool(free >= self._count_for(nbytes))

    def _count_for(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // self._page_bytes)

    def put(self, data: Any) -> int:
        """Write bytes into free pages; returns the first page, or -1 if too few are free."""
        if not self.has_room(len(data)):
            return -1
        count = self._count_for(len(data))
        taken = [self._take() for _ in range(count)]
        for page, after in zip(taken, [*taken[1:], -1], strict=True):
            self._next[page] = after
        flat, size = np.frombuffer(data, np.uint8), self._page_bytes
        whole = len(flat) // size
        self._pages[taken[:whole]] = flat[: whole * size].reshape(whole, size)
        if whole < count:
            self._pages[taken[-1], : len(flat) - whole * size] = flat[whole * size :]
        return taken[0]

    def _take(self) -> int:
        """Take a page from the free list, or else the first that was never used; one must be
        free.
        """
        head = self._head
        page = int(head["free_first"])
        if page >= 0:
            head["free_first"] = self._next[page]
            head["free_count"] -= 1
            return page
        page = int(head["fresh"])
        head["fresh"] = page + 1
        return page

    def _chain(self, page: int) -> list[int]:
        """List the pages of an item, given the first."""
        self._follow(0)
        found = []
        while page >= 0:
            found.append(page)
            page = self._next[page]
        return found

    def get(self, first: int, nbytes: int) -> Any:
        """Copy the bytes of an item, given its first page."""
        chain = self._chain(first)
        return self._pages[chain].reshape(-1)[:nbytes]

    def free(self, first: int) -> None:
        """Return an item's pages to the free list."""
        chain = self._chain(first)
        self._next[chain[-1]] = int(self._head["free_first"])
        self._head["free_first"] = first
        self._head["free_count"] += len(chain)
