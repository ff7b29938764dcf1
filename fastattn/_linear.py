"""Attention without softmax: ``(Q K^T) V``.

Without a softmax between them the two products associate::

    (Q K^T) V      N*S*D + N*S*E multiplications, an N x S array
    Q (K^T V)      S*D*E + N*D*E multiplications, a D x E array: the *state*

so a long sequence costs time linear in its length. `linear_attention` takes the cheaper order and works in chunks
of rows, which bounds the scratch memory and keeps it in cache. Matrix products are left to ``numpy.matmul``.

The causal form cuts the queries into chunks. A chunk sees every key before it through the state and the keys
beside it through a small lower triangle::

    keys ->   0     1     2
    chunk 0  [\\ ]
    chunk 1  [ state ][\\ ]
    chunk 2  [    state    ][\\ ]

Legend: B leading axes, H query heads, K key/value heads, G = H // K query heads that share one of them,
N queries, S keys, D features of a query or key, E features of a value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastattn._arrays import Array, accumulation_dtype
from fastattn._checks import check_arrays
from fastattn._options import check_flag, check_real
from fastattn._progress import check_progress, part_of, reported
from fastattn._typing import DoubleArray, Numbers, Real, Report, SmallFloat

# Rows of one chunk. They depend on nothing but the problem's own sizes, so that an entry's result does not
# depend on the entries that share its call.
_QUERY_ROWS = 256
_KEY_ROWS = 1024
_CAUSAL_ROWS = 128
# Numbers in one scratch array: 4 MiB of float32. Matrix products on smaller pieces ran 20 % slower.
SCRATCH_SIZE = 1 << 20
# Multiplications between two looks for a signal: 0.1 seconds of one thread in float64.
LONGEST_PRODUCT = 1 << 31


@overload
def linear_attention(  # type: ignore[overload-overlap]
    q: NDArray[SmallFloat],
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = ...,
    scale: Real = ...,
    progress: Report | None = ...,
) -> NDArray[SmallFloat]: ...
@overload
def linear_attention(
    q: DoubleArray | Numbers,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = ...,
    scale: Real = ...,
    progress: Report | None = ...,
) -> NDArray[np.float64]: ...
@overload
def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = ...,
    scale: Real = ...,
    progress: Report | None = ...,
) -> Array: ...


def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    scale: Real = 1.0,
    progress: Report | None = None,
) -> Array:
    """Attention without softmax: ``scale * (Q K^T) V``, in time linear in the sequence length.

    Parameters
    ----------
    q : array_like, shape (..., H, N, D)
        Queries. Two axes stand for one head (N, D), three for (H, N, D).
    k : array_like, shape (..., K, S, D)
        Keys. K divides H: head ``h`` reads key/value head ``h // (H // K)``.
    v : array_like, shape (..., K, S, E)
        Values. The leading axes of all three broadcast. One dtype for all three: float32, float64, float16 or
        bfloat16; lists and integers become float64.
    causal : bool, default False
        Query ``i`` sees key ``j`` only if ``j <= i + S - N``: the last query sees every key.
    scale : float, default 1.0
        Factor of the scores, any finite number. Beyond the accumulation type's range it is clamped to it.
    progress : callable, optional
        As for `attention`.

    Returns
    -------
    ndarray, shape (..., H, N, E)
        A new C-contiguous array of the dtype of `q`, (N, E) when all three have two axes. Half types are
        computed in float32. A query that sees no key gives 0.

    Raises
    ------
    TypeError
        If a dtype is not supported, the dtypes differ, `causal` is not a bool, or `scale` is not a real number.
    ValueError
        If the shapes do not fit or `scale` is not finite.

    Notes
    -----
    Takes ``(Q K^T) V`` or ``Q (K^T V)``, whichever needs fewer multiplications, in chunks; the causal form
    carries ``K^T V`` from chunk to chunk (Katharopoulos et al., *Transformers are RNNs*, 2020). Heads whose
    ``K^T V`` would leave the accumulation type's range are computed as written. Scratch memory does not grow
    with N or S. NaN or infinity in a key or value reaches only queries that see it.

    Examples
    --------
    >>> from fastattn import linear_attention
    >>> q = [[1, 0], [0, 1], [1, 1]]
    >>> linear_attention(q, q, [[1], [2], [3]])
    array([[4.],
           [5.],
           [9.]])
    >>> linear_attention(q, q, [[1], [2], [3]], causal=True)
    array([[1.],
           [2.],
           [9.]])
    """
    checked = check_arrays(q, k, v, paged=False)
    q, k, v, lead, dtype = checked.q, checked.k, checked.v, checked.lead, checked.q.dtype
    if k.dtype != dtype:
        raise TypeError(f"q, k and v must have the same dtype, got {dtype}, {k.dtype} and {v.dtype}")
    causal = check_flag("causal", causal)
    report = check_progress(progress)
    accumulation = accumulation_dtype(dtype)
    limit = float(np.finfo(accumulation).max)
    factor = max(-limit, min(limit, check_real("scale", scale)))
    n_heads, n_queries, head_dim = q.shape[-3:]
    n_kv_heads, n_keys, value_dim = v.shape[-3:]
    group = n_heads // n_kv_heads if n_kv_heads else 0
    out = np.empty(checked.out_shape, dtype)
    # One axis for the key/value heads and one for the query heads that share them: never a repeated key.
    shared = (*lead, n_kv_heads)
    queries = q.reshape(*shared, group, n_queries, head_dim)
    keys, values = k[..., np.newaxis, :, :], v[..., np.newaxis, :, :]
    results = out.reshape(*shared, group, n_queries, value_dim)
    rows, columns = min(n_queries, _QUERY_ROWS), min(n_keys, _KEY_ROWS)
    scratch = group * rows * (head_dim + value_dim + columns) + (columns + head_dim) * (head_dim + value_dim)
    with np.errstate(all="ignore"):
        cut = boxes(shared, scratch, group * rows * columns * (head_dim + value_dim))
        for index, box in enumerate(cut):
            how = accumulation, causal, factor, part_of(report, index, len(cut))
            if attend_linearly(queries[box], keys[box], values[box], results[box], *how):
                continue
            for head in entries(keys[box].shape[:-3]):
                query, key, value, result = (array[box][head] for array in (queries, keys, values, results))
                if not attend_linearly(query, key, value, result, *how):
                    attend_linearly(query, key, value, result, *how, keep_states=False)
    if progress is not None:
        progress(1.0)
    return out


def attend_linearly(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dtype: np.dtype[Any],
    causal: bool,
    scale: float,
    report: Report | None,
    *,
    keep_states: bool = True,
) -> bool:
    """Write the attention of a few heads: q (..., G, N, D), k (..., 1, S, D), v (..., 1, S, E).

    Returns False, and leaves rows unwritten, where K^T V leaves the range of the type, though ``(Q K^T) V`` may not.
    Without `keep_states` every product is taken as written.
    """
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    # Keys that every query sees, and queries that see none. What is left is a square below its diagonal.
    prefix = max(n_keys - n_queries, 0) if causal else n_keys
    blind = max(n_queries - n_keys, 0) if causal else 0
    by_state = (
        keep_states and prefix > 0 and _state_is_cheaper(q.shape[-3] * n_queries, prefix, k.shape[-1], v.shape[-1])
    )
    state = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1])) if by_state else None
    if state is not None:
        for keys, values in _key_chunks(k, v, prefix, dtype, part_of(report, 0, 2)):
            added = product_of(keys.swapaxes(-1, -2), values)
            if not product_fits(added, keys, values):
                return False
            state += added
    out[..., :blind, :] = 0
    step = _CAUSAL_ROWS if causal else _QUERY_ROWS
    steps = range(blind, n_queries, step)
    rest = report if state is None else part_of(report, 1, 2)
    for index, start in enumerate(reported(steps, rest)):
        stop = min(start + step, n_queries)
        queries = np.ascontiguousarray(q[..., start:stop, :], dtype=dtype)
        if scale != 1.0:
            queries = queries * scale
        if state is None:
            total = np.zeros((*queries.shape[:-1], v.shape[-1]), dtype)
        else:
            total = product_of(queries, state.astype(dtype, copy=False))
        if not by_state:
            seen = prefix if keep_states else prefix + (start - blind) * causal
            for keys, values in _key_chunks(k, v, seen, dtype, part_of(rest, index, len(steps))):
                total += product_of(product_of(queries, keys.swapaxes(-1, -2)), values)
        if causal:
            beside = slice(prefix + start - blind, prefix + stop - blind)
            keys = np.ascontiguousarray(k[..., beside, :], dtype=dtype)
            values = np.ascontiguousarray(v[..., beside, :], dtype=dtype)
            total += _triangle(queries, keys, values)
            if stop < n_queries and keep_states:
                added = product_of(keys.swapaxes(-1, -2), values)
                if not product_fits(added, keys, values):
                    return False
                state = added.astype(np.float64) if state is None else state + added
        out[..., start:stop, :] = total
    return True


def product_fits(product: Array, keys: Array, values: Array) -> bool:
    """Whether product (..., D, E) = keys (..., S, D)^T @ values (..., S, E) has lost nothing to the type's range.

    Its terms ``k * v`` are not those of ``(q * k) * v``: they may overflow, or vanish, where the latter do not.
    Infinite or NaN keys and values are what they are in either order. Each head is judged by itself.
    """
    limits = np.finfo(product.dtype)
    # A number of the least size has lost nothing that counts; as many as 2**20 of the largest have a finite sum.
    least, most = float(limits.tiny / limits.eps), float(limits.max) / 2**20
    largest = np.abs(product).max(axis=(-2, -1), initial=0.0)
    fits = (largest >= least) & (largest <= most)
    if fits.all():
        return True
    key, value = (np.abs(array).max(axis=(-2, -1), initial=0.0) for array in (keys, values))
    fits |= (largest <= most) & ((key == 0) | (value == 0) | (key >= least / value))
    fits |= ~(np.isfinite(key) & np.isfinite(value))
    return bool(fits.all())


def _triangle(queries: Array, keys: Array, values: Array) -> Array:
    """Return causal attention of a square chunk: row ``i`` sees keys ``0..i`` and nothing of the others."""
    n_rows = queries.shape[-2]
    scores = product_of(queries, keys.swapaxes(-1, -2))
    np.copyto(scores, 0, where=~np.tri(n_rows, dtype=np.bool_))
    if np.isfinite(values).all():
        return product_of(scores, values)
    # 0 * NaN is NaN: with such a value in the chunk each row must leave out what it does not see.
    rows = [scores[..., row : row + 1, : row + 1] @ values[..., : row + 1, :] for row in range(n_rows)]
    return np.concatenate(rows, axis=-2)


def _state_is_cheaper(n_rows: int, n_keys: int, head_dim: int, value_dim: int) -> bool:
    """Compare the multiplications of ``Q (K^T V)`` and ``(Q K^T) V`` for all rows that share a key head."""
    return (n_keys + n_rows) * head_dim * value_dim < n_rows * n_keys * (head_dim + value_dim)


def _key_chunks(
    k: Array, v: Array, stop: int, dtype: np.dtype[Any], report: Report | None
) -> Iterator[tuple[Array, Array]]:
    """Yield the first `stop` keys and values in contiguous chunks of `dtype`."""
    for start in reported(range(0, stop, _KEY_ROWS), report):
        rows = slice(start, min(start + _KEY_ROWS, stop))
        yield np.ascontiguousarray(k[..., rows, :], dtype=dtype), np.ascontiguousarray(v[..., rows, :], dtype=dtype)


def entries(lead: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, lead))


def product_of(a: Array, b: Array, out: Array | None = None, report: Report | None = None) -> Array:
    """``a @ b``; a long one by tiles, because no signal is handled during a call of NumPy."""
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if rows * inner * columns <= LONGEST_PRODUCT:
        return np.asarray(np.matmul(a, b, out=out))
    if out is None:
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        out = np.empty((*lead, rows, columns), np.result_type(a, b))
    side = max(64, math.isqrt(LONGEST_PRODUCT // inner))
    for top in reported(range(0, rows, side), report):
        for left in range(0, columns, side):
            tile = (..., slice(top, top + side), slice(left, left + side))
            np.matmul(a[..., top : top + side, :], b[..., left : left + side], out=out[tile])
    return out


def boxes(lead: tuple[int, ...], scratch: int, operations: int) -> list[tuple[slice, ...]]:
    """Cut an index space of shape `lead` into boxes of some entries, at least one, with so much scratch and so many
    operations each that a box is neither too large nor too long."""
    n_entries = min(SCRATCH_SIZE // max(scratch, 1), LONGEST_PRODUCT // max(operations, 1))
    sides: list[list[slice]] = []
    for length in reversed(lead):
        side = max(1, min(length, n_entries))
        n_entries //= side
        sides.append([slice(start, start + side) for start in range(0, length, side)])
    return list(itertools.product(*reversed(sides)))
