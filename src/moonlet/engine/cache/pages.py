"""Pages of MLA rows: which sequence owns which page.

A page holds ``page_size`` consecutive rows of one sequence, for all MLA layers at once. A row is
what Gated MLA keeps of one token (latent and shared key part). This file is the bookkeeping; the
bytes are in `cache.arenas`. Page 0 is never handed out: it stays zero and stands in block tables
for "nothing here yet".

Every page has a reference count and an epoch that grows with each hand-out, so that a page can
later be shared between sequences and a stale reference be told from a live one
(hybrid-cache.md section 5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from moonlet.core.errors import CapacityError, ConfigError

__all__ = ["NULL_PAGE", "PagePool"]

NULL_PAGE = 0


class PagePool:
    """Hands out page ids 1..num_pages; the one freed longest ago goes first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ConfigError(
                f"num_pages is {num_pages} and page_size {page_size}; both must be positive"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: deque[int] = deque(range(1, num_pages + 1))
        self._refs = [0] * (num_pages + 1)
        self._epochs = [0] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        """Pages that nobody refers to."""
        return len(self._free)

    def pages_for(self, num_rows: int) -> int:
        """How many pages hold ``num_rows`` rows."""
        return -(-num_rows // self.page_size)

    def epoch(self, page: int) -> int:
        """How often the page was handed out; differs after reuse."""
        return self._epochs[page]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages, all or none.

        Raises:
            CapacityError: Fewer pages are free; nothing was taken.
        """
        if count > len(self._free):
            raise CapacityError(
                f"{count} pages wanted, {len(self._free)} of {self.num_pages} free; wait"
            )
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
            self._epochs[page] += 1
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page; late pages of a sequence are reused first."""
        for page in reversed(list(pages)):
            assert 1 <= page <= self.num_pages, f"page {page} does not exist"
            assert self._refs[page] > 0, f"page {page} is free already"
            self._refs[page] -= 1
            if not self._refs[page]:
                self._free.append(page)

    def used(self) -> set[int]:
        """Ids of the pages that somebody refers to."""
        return {page for page, refs in enumerate(self._refs) if refs}

    def check(self) -> None:
        """Assert that every page is either free, once, or referred to."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self.used(), "a page is both free and owned"
        assert free | self.used() == set(range(1, self.num_pages + 1)), "a page is lost"
