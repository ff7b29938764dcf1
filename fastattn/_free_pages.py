"""Which free pages a sequence takes: side by side, as far as there is room, because what lies side by side is read
faster."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fastattn._arrays import Array

ROWS_TOGETHER = 256  # of more that follow each other, decoding gains 2 % at most


class FreePages:
    """Chooses free pages for one change. Nothing is written: pages are taken when the change is committed.

    Pages form groups. A sequence takes the page after its last one while that is in the same group, then the first of
    a group of which all are free, and when there is none, any. So groups are kept for those who began them as long as
    there are others, and no page is ever out of reach.
    """

    def __init__(self, counts: Array, page_size: int) -> None:
        self._counts = counts  # users of each page
        self._group = max(1, ROWS_TOGETHER // page_size)
        self._taken: set[int] = set()
        self._groups = self._first_of_free_groups()
        self._others = self._any_free()

    def take(self, last: int | None) -> int:
        """A page for a sequence whose pages so far end with `last`. There must be one."""
        page = self._beside(last)
        if page is None:
            page = next(self._groups, None)
        if page is None:
            page = next(self._others)
        self._taken.add(page)
        return page

    def _beside(self, last: int | None) -> int | None:
        if last is None:
            return None
        page = last + 1
        free = page % self._group and page < len(self._counts) and self._counts[page] == 0 and page not in self._taken
        return page if free else None

    def _first_of_free_groups(self) -> Iterator[int]:
        whole = len(self._counts) // self._group * self._group
        for group in np.flatnonzero(~self._counts[:whole].reshape(-1, self._group).any(axis=1)):
            yield int(group) * self._group

    def _any_free(self) -> Iterator[int]:
        for page in np.flatnonzero(self._counts == 0):
            if int(page) not in self._taken:
                yield int(page)
