"""`KVCache`: the keys and values of a batch that grows token by token, side by side."""

from __future__ import annotations

from typing import Any, Literal, SupportsIndex, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fastattn._arrays import Array, as_array, as_integers
from fastattn._cache_rows import CacheRows, Parts, check_counts, check_size, rows_that_count
from fastattn._typing import CacheOptions, DoubleArray, Numbers, SmallFloat


class KVCache(CacheRows):
    """Keys and values of a batch of sequences that grow, each in its own contiguous room.

    The cache is two arrays, (batch, num_kv_heads, capacity, features), and a length for each entry of the batch.
    `append` writes behind each entry's length, and `attend` is `attention` on the arrays where they lie: nothing is
    copied. ``keys`` (batch, K, S, D) and ``values`` (batch, K, S, E) are views of them up to the longest entry's length
    S; what they hold past an entry's own length means nothing.

    Parameters
    ----------
    batch : int
        Number of sequences.
    num_kv_heads : int
        Key/value heads.
    capacity : int
        Rows that each sequence has room for. Memory is taken from the system as rows are written.
    head_dim : int
        Features of a key, D.
    value_dim : int, optional
        Features of a value, E. Default: head_dim.
    dtype : data-type, default float32
        float32, float64, float16, bfloat16 (of ml_dtypes) or int8. int8 rows are quantized as they are appended, with
        one float32 scale for each token and head, and read as they are.

    Raises
    ------
    TypeError
        For another dtype, or a size that is not an integer.
    ValueError
        For a negative size, no heads or features, or sizes that no address can reach.
    MemoryError
        If the system does not provide the memory.

    Notes
    -----
    A method that raises, be it `MemoryError`, has changed nothing. Ctrl-C finds each call not yet made or complete.
    Calls that only read (`attend`, the properties) may run at once; nothing may run beside a call that changes the
    cache.

    Examples
    --------
    >>> import numpy as np, fastattn
    >>> rng = np.random.default_rng(0)
    >>> cache = fastattn.KVCache(2, 4, 100, 64)
    >>> prompt = rng.standard_normal((3, 2, 4, 10, 64), np.float32)  # q, k and v of ten tokens
    >>> cache.append(prompt[1], prompt[2])
    >>> cache.attend(prompt[0]).shape
    (2, 4, 10, 64)
    >>> token = rng.standard_normal((3, 2, 4, 1, 64), np.float32)
    >>> cache.append(token[1], token[2])
    >>> cache.attend(token[0]).shape, cache.lengths
    ((2, 4, 1, 64), array([11, 11]))
    """

    SIZES: tuple[str, str] = ("batch", "capacity")

    def __init__(
        self,
        batch: SupportsIndex,
        num_kv_heads: SupportsIndex,
        capacity: SupportsIndex,
        head_dim: SupportsIndex,
        *,
        value_dim: SupportsIndex | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self._batch = check_size("batch", batch, 0)
        self._capacity = check_size("capacity", capacity, 0)
        super().__init__(self._batch, num_kv_heads, self._capacity, head_dim, value_dim, dtype)
        self._lengths = np.zeros(self._batch, np.int64)

    def __repr__(self) -> str:
        return f"<KVCache of {self._batch} x {self._capacity} rows of {self._row_text()}, lengths {self._lengths}>"

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self._batch

    @property
    def capacity(self) -> int:
        """Rows that each entry has room for."""
        return self._capacity

    @property
    def lengths(self) -> Array:
        """How many rows each entry holds, (batch,) int64; a copy."""
        return self._lengths.copy()

    def _readable(self, parts: Parts) -> Parts:
        n_rows = int(self._lengths.max(initial=0))
        return tuple(part[:, :, :n_rows] for part in parts)

    def append(self, k: ArrayLike, v: ArrayLike, lengths: ArrayLike | None = None) -> None:
        """Write n more rows behind each entry's own.

        Parameters
        ----------
        k : array_like, shape (batch, K, n, D)
            In the cache's dtype. float16 and bfloat16 caches also take float32 and round it, int8 caches take float32,
            float16 or bfloat16 and quantize it.
        v : array_like, shape (batch, K, n, E)
            Of k's dtype.
        lengths : int or integer array_like, shape (batch,), optional
            How many of the n rows count, from the first, for each entry; the others are not looked at. Default: all.

        Raises
        ------
        TypeError
            For a dtype that is not allowed.
        ValueError
            For a shape, a count outside 0 ... n, rows that pass the capacity, or NaN and infinity in rows to be
            quantized. The cache is as it was.

        Examples
        --------
        >>> import numpy as np, fastattn
        >>> cache = fastattn.KVCache(2, 1, 8, 4)
        >>> rows = np.ones((2, 1, 3, 4), np.float32)
        >>> cache.append(rows, rows, lengths=[3, 1])
        >>> cache.lengths
        array([3, 1])
        """
        k, v = self._check_rows(k, v, (self._batch,))
        counts = check_counts(lengths, k.shape[2], (self._batch,))
        full = counts > self._capacity - self._lengths
        if full.any():
            worst = int(np.argmax(full))
            raise ValueError(
                f"k and v must fit the capacity of {self._capacity} rows, got {counts[worst]} for entry {worst}, "
                f"which holds {self._lengths[worst]}"
            )
        start, every = self._lengths, slice(None)
        source: tuple[Any, ...]
        target: tuple[Any, ...]
        if self._batch and (start == start[0]).all() and (counts == counts[0]).all():
            first, count = int(start[0]), int(counts[0])
            source, target = (every, every, slice(0, count)), (every, every, slice(first, first + count))
        else:
            entry, row = rows_that_count(counts, k.shape[2])
            source, target = (entry, every, row), (entry, every, start[entry] + row)
        self._store(target, self._encoded(k[source], v[source]))
        self._lengths = start + counts

    @overload
    def attend(  # type: ignore[overload-overlap]
        self, q: NDArray[SmallFloat], *, return_lse: Literal[False] = ..., **options: Unpack[CacheOptions]
    ) -> NDArray[SmallFloat]: ...
    @overload
    def attend(
        self, q: DoubleArray | Numbers, *, return_lse: Literal[False] = ..., **options: Unpack[CacheOptions]
    ) -> NDArray[np.float64]: ...
    @overload
    def attend(self, q: ArrayLike, *, return_lse: Literal[False] = ..., **options: Unpack[CacheOptions]) -> Array: ...
    @overload
    def attend(  # type: ignore[overload-overlap]
        self, q: NDArray[SmallFloat], *, return_lse: Literal[True], **options: Unpack[CacheOptions]
    ) -> tuple[NDArray[SmallFloat], NDArray[np.float32]]: ...
    @overload
    def attend(
        self, q: DoubleArray | Numbers, *, return_lse: Literal[True], **options: Unpack[CacheOptions]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...
    @overload
    def attend(
        self, q: ArrayLike, *, return_lse: Literal[True], **options: Unpack[CacheOptions]
    ) -> tuple[Array, Array]: ...
    @overload
    def attend(
        self, q: ArrayLike, *, return_lse: bool, **options: Unpack[CacheOptions]
    ) -> Array | tuple[Array, Array]: ...
    def attend(self, q: Any, *, causal: bool = True, **options: Any) -> Array | tuple[Array, Array]:
        """`attention` of q with every row that the entries hold, read where they lie.

        Causal is aligned at the end of each entry's own length: its last query sees its last row. So queries go with
        the rows just appended. After a ragged append, in which an entry's last queries are padding, say where its
        queries begin: ``q_offset`` = the lengths before it.

        Parameters
        ----------
        q : array_like, shape (batch, H, N, D)
            Queries; ``H % K == 0``. Of the cache's dtype, or float32 for float16, bfloat16 and int8 caches.
        causal : bool, default True
            As in `attention`.
        **options
            The other options of `attention`, but for kv_lens and block_table. The keys' axis of masks is as long as the
            longest entry.

        Returns
        -------
        ndarray, shape (batch, H, N, E), and with return_lse the log-sum-exps
            As of `attention`. An entry without rows gives 0.

        Raises
        ------
        TypeError, ValueError
            As `attention`.

        Examples
        --------
        >>> import numpy as np, fastattn
        >>> cache = fastattn.KVCache(2, 1, 8, 1)
        >>> rows = np.arange(6, dtype=np.float32).reshape(2, 1, 3, 1)
        >>> before = cache.lengths
        >>> cache.append(rows, rows, lengths=[3, 1])
        >>> cache.attend(0 * rows, q_offset=before)[:, 0, :, 0]  # means of what each query sees
        array([[0. , 0.5, 1. ],
               [3. , 3. , 3. ]], dtype=float32)
        """
        return self._attend(q, (self._batch,), causal=causal, kv_lens=self._lengths, options=options)

    def truncate(self, n: ArrayLike) -> None:
        """Keep the first n rows of each entry, for example those that a speculative decoder has accepted.

        Parameters
        ----------
        n : int or integer array_like, shape (batch,)
            Rows to keep, no more than the entry holds.

        Raises
        ------
        TypeError
            If n is not integers.
        ValueError
            For a shape, or an n outside 0 ... the entry's length.

        Examples
        --------
        >>> import numpy as np, fastattn
        >>> cache = fastattn.KVCache(2, 1, 8, 4)
        >>> cache.append(np.ones((2, 1, 5, 4), np.float32), np.ones((2, 1, 5, 4), np.float32))
        >>> cache.truncate([3, 5])
        >>> cache.lengths
        array([3, 5])
        """
        kept = as_integers("n", n, (self._batch,))
        wrong = (kept < 0) | (kept > self._lengths)
        if wrong.any():
            worst = int(np.argmax(wrong))
            raise ValueError(
                f"n must lie in 0 ... {self._lengths[worst]}, the rows that entry {worst} holds, got {kept[worst]}"
            )
        self._lengths = kept

    def reorder(self, index: ArrayLike) -> None:
        """Give each entry the rows of another: entry b becomes what entry ``index[b]`` was, as beam search needs it.

        The rows are copied to new arrays, so that there is memory for all rows twice until the copy is complete. Views
        that were taken before, such as ``keys``, keep the old arrays.

        Parameters
        ----------
        index : integer array_like, shape (batch,)
            Entries, 0 ... batch - 1. They may repeat.

        Raises
        ------
        TypeError
            If index is not integers.
        ValueError
            For a shape, or an entry that does not exist.

        Examples
        --------
        >>> import numpy as np, fastattn
        >>> cache = fastattn.KVCache(2, 1, 8, 1)
        >>> rows = np.array([[[[1.0]]], [[[2.0]]]], np.float32)
        >>> cache.append(rows, rows)
        >>> cache.reorder([1, 1])
        >>> cache.keys.ravel()
        array([2., 2.], dtype=float32)
        """
        array = as_array("index", index)
        if array.shape != (self._batch,):
            raise ValueError(f"index must have shape ({self._batch},), got {array.shape}")
        source = as_integers("index", array, (self._batch,))
        wrong = (source < 0) | (source >= self._batch)
        if wrong.any():
            raise ValueError(f"index must lie in 0 ... {self._batch - 1}, the entries, got {source[wrong][0]}")
        if (source == np.arange(self._batch)).all():
            return
        lengths = self._lengths[source]
        keys, values = (tuple(map(np.zeros_like, parts)) for parts in (self._keys, self._values))
        for new, old in zip(keys + values, self._keys + self._values, strict=True):
            for entry, (origin, length) in enumerate(zip(source, lengths, strict=True)):
                new[entry, :, :length] = old[origin, :, :length]
        self._keys, self._values, self._lengths = keys, values, lengths  # which nothing can interrupt

    def reset(self) -> None:
        """Forget all rows and keep the memory.

        Examples
        --------
        >>> import numpy as np, fastattn
        >>> cache = fastattn.KVCache(2, 1, 8, 4)
        >>> cache.append(np.ones((2, 1, 5, 4), np.float32), np.ones((2, 1, 5, 4), np.float32))
        >>> cache.reset()
        >>> cache.lengths
        array([0, 0])
        """
        self._lengths = np.zeros(self._batch, np.int64)
