"""`PagedKVCache`: keys and values of sequences that come and go, in pages that they may share."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._arrays import Array, as_array, as_integers
from fastattn._cache_rows import CacheRows, Parts, check_counts, check_size
from fastattn._pages import PagePool, Sequence


class PagedKVCache(CacheRows):
    """Keys and values of any number of sequences, kept in pages of one pool, as vLLM's PagedAttention keeps them.

    A sequence is known by the integer that `allocate` or `fork` gave. It takes a page from the pool when its rows need
    one. Forks share pages, which count their users; the first to write into a shared page gets its own copy.
    `attend` is `attention` on the pages where they lie. ``keys`` (num_pages, K, page_size, D) and ``values``
    (num_pages, K, page_size, E) are all pages.

    Parameters
    ----------
    num_pages : int
        Pages of the pool. Memory is taken from the system as pages are written.
    page_size : int
        Rows of a page. 16 and more cost next to nothing beside a contiguous cache.
    num_kv_heads : int
        Key/value heads.
    head_dim : int
        Features of a key, D.
    value_dim : int, optional
        Features of a value, E. Default: head_dim.
    dtype : dtype, default float32
        float32, float64, float16, bfloat16 (of ml_dtypes) or int8, as for `KVCache`.

    Raises
    ------
    TypeError
        For another dtype, or a size that is not an integer.
    ValueError
        For a negative size, or no heads, features or rows in a page.

    Notes
    -----
    `sequences` in the methods is one sequence or a list of B of them, and arrays then have shapes (K, n, D) or
    (B, K, n, D). A method that raises has changed nothing. Calls that only read (`attend`, the properties)
    may run at once; nothing may run beside a call that changes the cache.

    The layout and copy on write are those of Kwon et al., *Efficient Memory Management for Large Language Model Serving
    with PagedAttention*, 2023.

    Examples
    --------
    >>> import numpy as np, fastattn
    >>> rng = np.random.default_rng(0)
    >>> cache = fastattn.PagedKVCache(100, 16, 4, 64)
    >>> prompt = rng.standard_normal((3, 4, 40, 64), np.float32)  # q, k and v of 40 tokens
    >>> first = cache.allocate()
    >>> cache.append(prompt[1], prompt[2], first)
    >>> second = cache.fork(first)  # goes on from the same prompt
    >>> cache.num_free_pages
    97
    >>> token = rng.standard_normal((3, 2, 4, 1, 64), np.float32)  # a token for each
    >>> cache.append(token[1], token[2], [first, second])
    >>> cache.attend(token[0], [first, second]).shape, cache.lengths([first, second])
    ((2, 4, 1, 64), array([41, 41]))
    >>> cache.num_free_pages  # two of three pages are shared
    96
    >>> cache.free([first, second])
    >>> cache.num_free_pages
    100
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: Any = np.float32,
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
        return len(self._pool.free_pages)

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

    def _find(self, sequences: Any, *, different: bool = False) -> tuple[list[Sequence], tuple[int, ...]]:
        """The sequences of these numbers, and the leading shape of arrays that go with them: () or (B,)."""
        array = as_array("sequences", sequences)
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"sequences must be integers, got {array.dtype}")
        if array.ndim > 1:
            raise ValueError(f"sequences must be one integer or have shape (B,), got {array.shape}")
        numbers = array.reshape(-1).tolist()
        found = self._pool.find(numbers)
        if different and len(set(numbers)) < len(numbers):
            raise ValueError(f"sequences must be different ones, got {numbers}")
        return found, array.shape

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
        return self._pool.add(Sequence())

    def fork(self, sequence: int, length: int | None = None) -> int:
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
        return self._pool.add(self._pool.share(source, n_rows))

    def append(self, k: Any, v: Any, sequences: Any, lengths: Any = None) -> None:
        """Write n more rows at the end of each sequence, which takes pages as it needs them.

        Parameters
        ----------
        k : array_like, shape (K, n, D) or (B, K, n, D)
            In the cache's dtype. float16 and bfloat16 caches also take float32 and round it, int8 caches take float32,
            float16 or bfloat16 and quantize it.
        v : array_like, shape (K, n, E) or (B, K, n, E)
            Of k's dtype.
        sequences : int or integer array_like, shape (B,)
            A sequence, or several different ones.
        lengths : int or integer array_like, shape (B,), optional
            How many of the n rows count, from the first, for each sequence; the others are not looked at. Default: all.

        Raises
        ------
        TypeError
            For a dtype that is not allowed.
        ValueError
            For a dead sequence or one that comes twice, a shape, a count outside 0 ... n, more pages than are free for
            all sequences together, or NaN and infinity in rows to be quantized. The cache is as it was.

        Examples
        --------
        >>> import numpy as np, fastattn
        >>> cache = fastattn.PagedKVCache(2, 16, 1, 4)
        >>> pair, rows = [cache.allocate(), cache.allocate()], np.ones((2, 1, 20, 4), np.float32)
        >>> cache.append(rows, rows, pair, lengths=[3, 16])
        >>> cache.lengths(pair)
        array([ 3, 16])
        >>> cache.append(rows, rows, pair, lengths=[0, 1])
        Traceback (most recent call last):
            ...
        ValueError: k and v must fit the pages that are free, got rows for 1 more with 0 free
        """
        found, lead = self._find(sequences, different=True)
        k, v = self._check_rows(k, v, lead)
        k, v = (x if lead else x[None] for x in (k, v))
        counts = check_counts(lengths, k.shape[2], lead)
        growth = list(zip(found, counts.tolist(), strict=True))
        needed = self._pool.needed(growth)
        if needed > self.num_free_pages:
            raise ValueError(
                f"k and v must fit the pages that are free, got rows for {needed} more with {self.num_free_pages} free"
            )
        entry, row = np.nonzero(np.arange(k.shape[2]) < counts[:, None])  # of each row that counts
        new = self._encoded(k[entry, :, row], v[entry, :, row])
        starts = [sequence.length for sequence in found]
        copies = self._pool.grow(growth)
        if copies:
            old, own = np.array(copies).T
            for part in self._keys + self._values:
                part[own] = part[old]
        if len(entry):
            pages, rows = map(np.concatenate, zip(*map(self._pool.places, found, starts), strict=True))
            self._store((pages, slice(None), rows), new)

    def truncate(self, sequences: Any, n: Any) -> None:
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
        found, lead = self._find(sequences, different=True)
        kept = as_integers("n", n, lead).reshape(-1)
        for sequence, length in zip(found, kept, strict=True):
            if not 0 <= length <= sequence.length:
                raise ValueError(f"n must lie in 0 ... {sequence.length}, the sequence's length, got {length}")
        for sequence, length in zip(found, kept.tolist(), strict=True):
            self._pool.shrink(sequence, length)

    def free(self, sequences: Any) -> None:
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
        found, _ = self._find(sequences, different=True)
        for number, sequence in zip(np.ravel(sequences), found, strict=True):
            self._pool.shrink(sequence, 0)
            del self._pool.sequences[int(number)]

    def lengths(self, sequences: Any) -> Array:
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
        found, lead = self._find(sequences)
        return np.array([sequence.length for sequence in found], np.int64).reshape(lead)

    def block_table(self, sequences: Any) -> Array:
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
        found, lead = self._find(sequences)
        table = self._pool.table(found)
        return table.reshape(*lead, table.shape[1])

    def attend(self, q: Any, sequences: Any, *, causal: bool = True, **options: Any) -> Any:
        """`attention` of q with all rows of the sequences, read where they lie.

        Parameters
        ----------
        q : array_like, shape (H, N, D) or (B, H, N, D)
            Queries; ``H % K == 0``. Of the cache's dtype, or float32 for float16, bfloat16 and int8 caches.
        sequences : int or integer array_like, shape (B,)
            A sequence, or several, which may repeat.
        causal : bool, default True
            As in `attention`: the last query sees the sequence's last row.
        **options
            The other options of `attention`, but for kv_lens and block_table. The keys' axis of masks is as long as the
            pages of the longest sequence.

        Returns
        -------
        ndarray, shape (H, N, E) or (B, H, N, E), and with return_lse the log-sum-exps
            As of `attention`. A sequence without rows gives 0.

        Raises
        ------
        TypeError, ValueError
            As `attention`, and for a dead sequence.

        Examples
        --------
        >>> import numpy as np, fastattn
        >>> cache = fastattn.PagedKVCache(8, 16, 1, 1)
        >>> sequence, rows = cache.allocate(), np.arange(3, dtype=np.float32).reshape(1, 3, 1)
        >>> cache.append(rows, rows, sequence)
        >>> cache.attend(0 * rows, sequence)[0, :, 0]
        array([0. , 0.5, 1. ], dtype=float32)
        """
        lengths, table = self.lengths(sequences), self.block_table(sequences)
        return self._attend(q, lengths.shape, causal=causal, kv_lens=lengths, block_table=table, options=options)
