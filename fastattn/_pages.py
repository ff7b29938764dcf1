"""Which sequence uses which pages of a pool: bookkeeping without any keys or values.

A change is planned first, on paper, and then made by `commit`. What may fail or be interrupted is in the plan, so that
the bookkeeping is always that before the change or that after it. This needs sequences that are replaced, not changed.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fastattn._arrays import Array
from fastattn._free_pages import FreePages

NO_PAGES: array[int] = array("q")


class Sequence(NamedTuple):
    """Rows [0, length) lie in `pages`, in order; there are no more pages than that needs."""

    length: int = 0
    pages: array[int] = NO_PAGES  # never changed; NumPy reads it as it is


class Change(NamedTuple):
    """What `commit` is to make true."""

    sequences: dict[int, Sequence]  # of numbers that there are
    users: dict[int, int]  # of pages whose number of users changes
    n_free: int


class PagePool:
    """Pages that count their users, and the sequences that use them."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.counts = np.zeros(n_pages, np.int64)
        self.n_free = n_pages
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

    def add(self, length: int = 0, pages: array[int] = NO_PAGES) -> int:
        """A number for a sequence of these pages. Numbers are never given twice, so that a freed one stays dead."""
        index = np.array(pages, np.int64)
        users = self.counts[index] + 1
        number, sequence = self._next, Sequence(length, pages)
        following = number + 1
        # No calls and no loops from here on, as in `commit`.
        self.sequences[number] = sequence
        try:
            self.counts[index] = users
        except MemoryError:
            del self.sequences[number]
            raise
        self._next = following
        return number

    def share(self, sequence: Sequence, length: int) -> int:
        """The number of a new sequence of the first `length` rows, in the same pages."""
        return self.add(length, sequence.pages[: self.pages_for(length)])

    def shrinking(self, cuts: dict[int, int]) -> Change:
        """Keep so many rows of the sequences of these numbers; pages that nobody uses any more are free."""
        sequences: dict[int, Sequence] = {}
        users: dict[int, int] = {}
        for number, length in cuts.items():
            pages, kept = self.sequences[number].pages, self.pages_for(length)
            for page in pages[kept:]:
                users[page] = users.get(page, int(self.counts[page])) - 1
            sequences[number] = Sequence(length, pages[:kept])
        return Change(sequences, users, self.n_free + sum(left == 0 for left in users.values()))

    def growing(self, growth: dict[int, int]) -> tuple[Change, list[tuple[int, int]]]:
        """Make room for so many more rows of each sequence; with the copies of pages (from, to) that this needs."""
        copying = self._copying(growth)
        before = {number: self.sequences[number] for number in growth}
        after = {number: sequence.length + growth[number] for number, sequence in before.items()}
        added = {number: self.pages_for(after[number]) - len(before[number].pages) for number in growth}
        needed = sum(added.values()) + len(copying)
        if needed > self.n_free:
            raise ValueError(
                f"k and v must fit the pages that are free, got rows for {needed} more with {self.n_free} free"
            )
        free = FreePages(self.counts, self.page_size)
        sequences: dict[int, Sequence] = {}
        users: dict[int, int] = {}
        copies: list[tuple[int, int]] = []
        for number, (_, pages) in before.items():
            kept = pages[:-1] if number in copying else pages
            taken: list[int] = []
            last = kept[-1] if kept else None
            for _ in range(added[number] + len(pages) - len(kept)):
                last = free.take(last)
                taken.append(last)
            users |= dict.fromkeys(taken, 1)
            if number in copying:
                shared = pages[-1]
                users[shared] = users.get(shared, int(self.counts[shared])) - 1
                copies.append((shared, taken[0]))
            sequences[number] = Sequence(after[number], kept + array("q", taken) if taken else pages)
        return Change(sequences, users, self.n_free - needed), copies

    def _copying(self, growth: dict[int, int]) -> set[int]:
        """Numbers of sequences that need their own copy of the page they go on filling."""
        writers: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for place, (number, n_rows) in enumerate(growth.items()):
            length, pages = self.sequences[number]
            if n_rows and length % self.page_size and self.counts[pages[-1]] > 1:
                writers[pages[-1]].append((length, place))
        for page, found in writers.items():
            if len(found) == self.counts[page]:
                # One user may stay: the longest, whose new rows lie behind those of all others. They are written
                # before the others have left the page.
                found.remove(max(found))
        numbers = list(growth)
        return {numbers[place] for found in writers.values() for _, place in found}

    def commit(self, change: Change, ended: Iterable[int] = ()) -> None:
        """Make the change, and forget the sequences that ended."""
        pages = np.fromiter(change.users.keys(), np.int64, len(change.users))
        users = np.fromiter(change.users.values(), np.int64, len(change.users))
        forgotten = set(ended)
        sequences = self.sequences
        if forgotten:
            sequences = {number: found for number, found in sequences.items() if number not in forgotten}
        changed = {number: found for number, found in change.sequences.items() if number not in forgotten}
        # An interrupt comes in calls and loops, of which there are none before the last line, and none comes within
        # that line. The next line takes its memory before it writes, and the others take none.
        self.counts[pages] = users
        self.n_free, self.sequences = change.n_free, sequences
        sequences.update(changed)

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
