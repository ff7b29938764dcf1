"""`PagedKVCache`: keys and values of sequences that come and go, in pages that they may share."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastattn._arrays import Array
from fastattn._cache_rows import check_counts, rows_that_count
from fastattn._sequences import PagedSequences
from fastattn._typing import CacheOptions, DoubleArray, Numbers, SmallFloat


class PagedKVCache(PagedSequences):
    """Keys and values of any number of sequences, kept in pages of one pool, as vLLM's PagedAttention keeps them.

    A sequence is known by the integer that `allocate` or `fork` gave. It takes a page from the pool when its rows need
    one, the page after its last one if it can. Forks share pages, which count their users; the first to write into a
    shared page gets its own copy. `attend` is `attention` on the pages where they lie. ``keys`` (num_pages, K,
    page_size, D) and ``values`` (num_pages, K, page_size, E) are all pages.

    Parameters
    ----------
    num_pages : int
        Pages of the pool. Memory is taken from the system as pages are written.
    page_size : int
        Rows of a page. Pages of 16 cost `attend` up to a fifth more time than a contiguous cache in float32, up to two
        fifths in narrower types, most with short rows and two threads, and more if other sequences have left pages
        here and there. Larger pages cost less.
    num_kv_heads : int
        Key/value heads.
    head_dim : int
        Features of a key, D.
    value_dim : int, optional
        Features of a value, E. Default: head_dim.
    dtype : data-type, default float32
        float32, float64, float16, bfloat16 (of ml_dtypes) or int8, as for `KVCache`.

    Raises
    ------
    TypeError
        For another dtype, or a size that is not an integer.
    ValueError
        For a negative size, no heads, features or rows in a page, or sizes that no address can reach.
    MemoryError
        If the system does not provide the memory.

    Notes
    -----
    `sequences` in the methods is one sequence or a list of B of them, and arrays then have shapes (K, n, D) or
    (B, K, n, D). A method that raises, be it `MemoryError`, has changed nothing. Ctrl-C finds each call
    not yet made or complete. Calls that only read (`attend`, the properties) may run at once; nothing may run beside a
    call that changes the cache.

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

    def append(self, k: ArrayLike, v: ArrayLike, sequences: ArrayLike, lengths: ArrayLike | None = None) -> None:
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
        numbers, lead = self._find(sequences, different=True)
        k, v = self._check_rows(k, v, lead)
        k, v = (x if lead else x[None] for x in (k, v))
        counts = check_counts(lengths, k.shape[2], lead)
        change, copies = self._pool.growing(dict(zip(numbers, counts.tolist(), strict=True)))
        entry, row = rows_that_count(counts, k.shape[2])
        new = self._encoded(k[entry, :, row], v[entry, :, row])
        # Everything is written where no sequence has rows yet: nothing has happened until the change is committed.
        for shared, own in copies:
            for part in self._keys + self._values:
                part[own] = part[shared]
        if len(entry):
            starts = [sequence.length for sequence in self._pool.find(numbers)]
            places = map(self._pool.places, change.sequences.values(), starts)
            pages, rows = map(np.concatenate, zip(*places, strict=True))
            self._store((pages, slice(None), rows), new)
        self._pool.commit(change)

    @overload
    def attend(  # type: ignore[overload-overlap]
        self,
        q: NDArray[SmallFloat],
        sequences: ArrayLike,
        *,
        return_lse: Literal[False] = ...,
        **options: Unpack[CacheOptions],
    ) -> NDArray[SmallFloat]: ...
    @overload
    def attend(
        self,
        q: DoubleArray | Numbers,
        sequences: ArrayLike,
        *,
        return_lse: Literal[False] = ...,
        **options: Unpack[CacheOptions],
    ) -> NDArray[np.float64]: ...
    @overload
    def attend(
        self, q: ArrayLike, sequences: ArrayLike, *, return_lse: Literal[False] = ..., **options: Unpack[CacheOptions]
    ) -> Array: ...
    @overload
    def attend(  # type: ignore[overload-overlap]
        self,
        q: NDArray[SmallFloat],
        sequences: ArrayLike,
        *,
        return_lse: Literal[True],
        **options: Unpack[CacheOptions],
    ) -> tuple[NDArray[SmallFloat], NDArray[np.float32]]: ...
    @overload
    def attend(
        self,
        q: DoubleArray | Numbers,
        sequences: ArrayLike,
        *,
        return_lse: Literal[True],
        **options: Unpack[CacheOptions],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...
    @overload
    def attend(
        self, q: ArrayLike, sequences: ArrayLike, *, return_lse: Literal[True], **options: Unpack[CacheOptions]
    ) -> tuple[Array, Array]: ...
    @overload
    def attend(
        self, q: ArrayLike, sequences: ArrayLike, *, return_lse: bool, **options: Unpack[CacheOptions]
    ) -> Array | tuple[Array, Array]: ...
    def attend(
        self, q: Any, sequences: ArrayLike, *, causal: bool = True, **options: Any
    ) -> Array | tuple[Array, Array]:
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
            pages of the longest sequence: 8 for 6 rows in pages of 4.

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
