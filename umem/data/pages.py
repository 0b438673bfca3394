"""Bytes of items in pages of one size, so that items of any size leave no gaps."""

from __future__ import annotations

from typing import Any

import numpy as np

SMALLEST_PAGE, LARGEST_PAGE = 256, 1 << 16
PAGES_AN_ITEM = 128
"""An item of the first one's size takes this many pages: an item wastes half a page on average."""

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

    def _open(self, nbytes: int) -> None:
        """Choose the page size by the first item, or read the one that another process chose."""
        head = self._head
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

    def free_count_for(self, nbytes: int) -> tuple[int, int]:
        """Return how many pages are free, and how many an item of ``nbytes`` takes."""
        head = self._head
        if not self._page_bytes or head["page_bytes"] != self._page_bytes:  # or forgotten elsewhere
            self._open(nbytes)
        free = head["free_count"] + head["page_count"] - head["fresh"]
        return int(free), -(-max(nbytes, 1) // int(head["page_bytes"]))

    def put(self, data: Any) -> int:
        """Write bytes into free pages; returns the first page, or -1 if too few are free."""
        free, count = self.free_count_for(len(data))
        if free < count:
            return -1
        taken = [self._take() for _ in range(count)]
        for page, after in zip(taken, [*taken[1:], -1], strict=True):
            self._next[page] = after
        flat, size = np.frombuffer(data, np.uint8), self._pages.shape[1]
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
        found = []
        while page >= 0:
            found.append(page)
            page = self._next[page]
        return found

    def get(self, first: int, nbytes: int) -> Any:
        """Copy the bytes of an item, given its first page."""
        self.free_count_for(nbytes)
        return self._pages[self._chain(first)].reshape(-1)[:nbytes]

    def free(self, first: int, nbytes: int) -> None:
        """Return an item's pages to the free list."""
        self.free_count_for(nbytes)
        chain = self._chain(first)
        self._next[chain[-1]] = int(self._head["free_first"])
        self._head["free_first"] = first
        self._head["free_count"] += len(chain)
