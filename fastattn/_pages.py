"""Which sequence uses which pages of a pool: bookkeeping without any keys or values."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from fastattn._arrays import Array


def _no_pages() -> array[int]:
    return array("q")  # grows as a list does, and NumPy reads it as it is


@dataclass(slots=True)
class Sequence:
    """Rows [0, length) lie in `pages`, in order; there are no more pages than that needs."""

    length: int = 0
    pages: array[int] = field(default_factory=_no_pages)


class PagePool:
    """Pages that count their users, and the sequences that use them."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.counts = np.zeros(n_pages, np.int64)
        self.free_pages = list(range(n_pages - 1, -1, -1))  # a stack: what was freed last is still in cache
        self.sequences: dict[int, Sequence] = {}
        self._next = 0

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def find(self, numbers: Iterable[int]) -> list[Sequence]:
        """The living sequences of these numbers."""
        found: list[Sequence] = []
        for number in numbers:
            sequence = self.sequences.get(number)
            if sequence is None:
                came = "which has been freed" if 0 <= number < self._next else "which was never allocated"
                raise ValueError(f"sequences must be allocated and not freed, got {number}, {came}")
            found.append(sequence)
        return found

    def add(self, sequence: Sequence) -> int:
        """A number for a sequence. Numbers are never given twice, so that a freed one stays dead."""
        number = self._next
        self._next += 1
        self.sequences[number] = sequence
        return number

    def share(self, sequence: Sequence, length: int) -> Sequence:
        """A sequence of the first `length` rows, in the same pages."""
        pages = sequence.pages[: self.pages_for(length)]
        self.counts[pages] += 1
        return Sequence(length, pages)

    def shrink(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` rows; pages that nobody uses any more are free."""
        kept = self.pages_for(length)
        for page in reversed(sequence.pages[kept:]):
            self.counts[page] -= 1
            if self.counts[page] == 0:
                self.free_pages.append(page)
        del sequence.pages[kept:]
        sequence.length = length

    def needed(self, growth: list[tuple[Sequence, int]]) -> int:
        """Pages that `grow` takes for all of them together."""
        needed = 0
        written: Counter[int] = Counter()  # last pages that go on being filled
        for sequence, n_rows in growth:
            needed += self.pages_for(sequence.length + n_rows) - len(sequence.pages)
            if n_rows and sequence.length % self.page_size:
                written[sequence.pages[-1]] += 1
        # Every writer of a shared page copies it, except the last user there is.
        return needed + sum(min(writers, int(self.counts[page]) - 1) for page, writers in written.items())

    def grow(self, growth: list[tuple[Sequence, int]]) -> list[tuple[int, int]]:
        """Make room for so many more rows of each sequence; return the copies of pages (from, to) that this needs."""
        copies: list[tuple[int, int]] = []
        for sequence, n_rows in growth:
            if n_rows and sequence.length % self.page_size and self.counts[sequence.pages[-1]] > 1:
                shared = sequence.pages[-1]
                self.counts[shared] -= 1
                sequence.pages[-1] = self._take()
                copies.append((shared, sequence.pages[-1]))
            for _ in range(self.pages_for(sequence.length + n_rows) - len(sequence.pages)):
                sequence.pages.append(self._take())
            sequence.length += n_rows
        return copies

    def _take(self) -> int:
        page = self.free_pages.pop()
        self.counts[page] = 1
        return page

    def places(self, sequence: Sequence, start: int) -> tuple[Array, Array]:
        """Page and row within it of each row from `start` on."""
        first = start // self.page_size
        positions = np.arange(start, sequence.length)
        return np.array(sequence.pages[first:])[positions // self.page_size - first], positions % self.page_size

    def table(self, sequences: list[Sequence]) -> Array:
        """Pages of each sequence in order, (sequences, pages of the longest), filled up with -1."""
        table = np.full((len(sequences), max((len(s.pages) for s in sequences), default=0)), -1, np.int64)
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.pages)] = sequence.pages
        return table
