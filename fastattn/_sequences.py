"""Sequences of a paged cache: which there are, how long they are, and in which pages they lie."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from fastattn._arrays import Array, as_integers, int64_array
from fastattn._cache_rows import CacheRows, Parts, check_size
from fastattn._pages import PagePool


class PagedSequences(CacheRows):
    """All of `PagedKVCache` that neither writes rows nor attends to them."""

    SIZES: tuple[str, str] = ("num_pages", "page_size")

    def __init__(
        self,
        num_pages: SupportsIndex,
        page_size: SupportsIndex,
        num_kv_heads: SupportsIndex,
        head_dim: SupportsIndex,
        *,
        value_dim: SupportsIndex | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        n_pages, rows = check_size("num_pages", num_pages, 0), check_size("page_size", page_size, 1)
        super().__init__(n_pages, num_kv_heads, rows, head_dim, value_dim, dtype)
        self._pool = PagePool(n_pages, rows)

    def __repr__(self) -> str:
        used = f"{self.num_pages - self.num_free_pages} of {self.num_pages} pages"
        return f"<PagedKVCache, {used} in use, of {self.page_size} rows of {self._row_text()}>"

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return len(self._pool.counts)

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self._pool.page_size

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence uses."""
        return self._pool.n_free

    @property
    def reference_counts(self) -> Array:
        """How many sequences use each page, (num_pages,) int64; a copy."""
        return self._pool.counts.copy()

    @property
    def sequences(self) -> list[int]:
        """The sequences that are allocated and not freed, oldest first."""
        return list(self._pool.sequences)

    def _readable(self, parts: Parts) -> Parts:
        return parts

    def _find(self, sequences: ArrayLike, *, different: bool = False) -> tuple[list[int], tuple[int, ...]]:
        """Numbers of living sequences, and the leading shape of arrays that go with them: () or (B,)."""
        array = int64_array("sequences", sequences)
        if array.ndim > 1:
            raise ValueError(f"sequences must be one integer or have shape (B,), got {array.shape}")
        numbers = array.reshape(-1).tolist()
        self._pool.find(numbers)
        if different and len(set(numbers)) < len(numbers):
            raise ValueError(f"sequences must be different ones, got {numbers}")
        return numbers, array.shape

    def allocate(self) -> int:
        """Begin a sequence without rows, which takes no page yet.

        Returns
        -------
        int
            The sequence's number, which no other sequence of this cache ever gets.

        Examples
        --------
        >>> import fastattn
        >>> cache = fastattn.PagedKVCache(8, 16, 1, 4)
        >>> cache.allocate(), cache.allocate()
        (0, 1)
        """
        return self._pool.add()

    def fork(self, sequence: SupportsIndex, length: SupportsIndex | None = None) -> int:
        """Begin a sequence with another's first rows, in the same pages.

        Parameters
        ----------
        sequence : int
            The sequence to take from; it stays as it is.
        length : int, optional
            Rows to share. Default: all.

        Returns
        -------
        int
            The new sequence's number.

        Raises
        ------
        TypeError
            If an argument is not an integer.
        ValueError
            For a dead sequence, or a length outside 0 ... its own.

        Examples
        --------
        >>> import numpy as np, fastattn
        >>> cache = fastattn.PagedKVCache(8, 16, 1, 4)
        >>> sequence = cache.allocate()
        >>> cache.append(np.ones((1, 20, 4), np.float32), np.ones((1, 20, 4), np.float32), sequence)
        >>> prefix = cache.fork(sequence, 10)
        >>> cache.lengths(prefix), cache.reference_counts[:2]
        (array(10), array([2, 1]))
        """
        (source,) = self._pool.find([check_size("sequence", sequence, 0)])
        n_rows = source.length if length is None else check_size("length", length, 0)
        if n_rows > source.length:
            raise ValueError(f"length must lie in 0 ... {source.length}, the sequence's own, got {n_rows}")
        return self._pool.share(source, n_rows)

    def truncate(self, sequences: ArrayLike, n: ArrayLike) -> None:
        """Keep the first n rows of each sequence; pages that nobody uses any more are free.

        Parameters
        ----------
        sequences : int or integer array_like, shape (B,)
            A sequence, or several different ones.
        n : int or integer array_like, shape (B,)
            Rows to keep, no more than the sequence holds.

        Raises
        ------
        TypeError
            If n is not integers.
        ValueError
            For a dead sequence or one that comes twice, a shape, or an n outside 0 ... the sequence's length.

        Examples
        --------
        >>> import numpy as np, fastattn
        >>> cache = fastattn.PagedKVCache(8, 16, 1, 4)
        >>> sequence = cache.allocate()
        >>> cache.append(np.ones((1, 20, 4), np.float32), np.ones((1, 20, 4), np.float32), sequence)
        >>> cache.truncate(sequence, 16)
        >>> cache.num_free_pages
        7
        """
        numbers, lead = self._find(sequences, different=True)
        found = self._pool.find(numbers)
        kept = as_integers("n", n, lead).reshape(-1)
        for sequence, length in zip(found, kept, strict=True):
            if not 0 <= length <= sequence.length:
                raise ValueError(f"n must lie in 0 ... {sequence.length}, the sequence's length, got {length}")
        self._pool.commit(self._pool.shrinking(dict(zip(numbers, kept.tolist(), strict=True))))

    def free(self, sequences: ArrayLike) -> None:
        """End sequences; pages that nobody uses any more are free.

        Parameters
        ----------
        sequences : int or integer array_like, shape (B,)
            A sequence, or several different ones.

        Raises
        ------
        TypeError
            If sequences are not integers.
        ValueError
            For a dead sequence or one that comes twice. None is freed then.

        Examples
        --------
        >>> import fastattn
        >>> cache = fastattn.PagedKVCache(8, 16, 1, 4)
        >>> cache.free([cache.allocate(), cache.allocate()])
        >>> cache.sequences
        []
        """
        numbers, _ = self._find(sequences, different=True)
        self._pool.commit(self._pool.shrinking(dict.fromkeys(numbers, 0)), ended=numbers)

    def lengths(self, sequences: ArrayLike) -> Array:
        """How many rows sequences hold, int64 of shape () for one and (B,) for several.

        Raises
        ------
        TypeError, ValueError
            If sequences are not integers, or one of them is dead.

        Examples
        --------
        >>> import fastattn
        >>> cache = fastattn.PagedKVCache(8, 16, 1, 4)
        >>> cache.lengths([cache.allocate()])
        array([0])
        """
        numbers, lead = self._find(sequences)
        return np.array([sequence.length for sequence in self._pool.find(numbers)], np.int64).reshape(lead)

    def block_table(self, sequences: ArrayLike) -> Array:
        """Pages of sequences in order, as `attention` takes them beside ``keys``, ``values`` and ``lengths``.

        The shape is (max_pages,) for one sequence and (B, max_pages) for several. max_pages is what the longest needs;
        the rows of shorter ones end in -1.

        Raises
        ------
        TypeError, ValueError
            As for `lengths`.

        Examples
        --------
        >>> import numpy as np, fastattn
        >>> cache = fastattn.PagedKVCache(8, 16, 1, 4)
        >>> pair, rows = [cache.allocate(), cache.allocate()], np.ones((2, 1, 20, 4), np.float32)
        >>> cache.append(rows, rows, pair, lengths=[20, 3])
        >>> cache.block_table(pair)
        array([[ 0,  1],
               [ 2, -1]])
        """
        numbers, lead = self._find(sequences)
        table = self._pool.table(self._pool.find(numbers))
        return table.reshape(*lead, table.shape[1])
