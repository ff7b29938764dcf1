"""Attention without softmax: ``(Q K^T) V``, and the self-attention layer made of it.

Without a softmax between them the two products associate::

    (Q K^T) V      N*S*D + N*S*E multiplications, an N x S array
    Q (K^T V)      S*D*E + N*D*E multiplications, a D x E array: the *state*

so a long sequence costs time linear in its length. Both functions take the cheaper order and work in chunks
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

from fastattn._arrays import FLOAT32, FLOAT64, Array, as_floats
from fastattn._checks import check_arrays
from fastattn._options import check_flag, check_real
from fastattn._typing import DoubleArray, Numbers, Real, SmallFloat

__all__ = ["linear_attention", "mhsa_forward"]

# Rows of one chunk. They depend on nothing but the problem's own sizes, so that an entry's result does not
# depend on the entries that share its call.
_QUERY_ROWS = 256
_KEY_ROWS = 1024
_CAUSAL_ROWS = 128
# Numbers in one scratch array: 4 MiB of float32. Matrix products on smaller pieces ran 20 % slower.
_SCRATCH_SIZE = 1 << 20


def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return float64 for float64 and float32 for everything smaller."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


@overload
def mhsa_forward(  # type: ignore[overload-overlap]
    x: NDArray[SmallFloat], w_qkv: NDArray[SmallFloat]
) -> NDArray[SmallFloat]: ...
@overload
def mhsa_forward(x: DoubleArray | Numbers, w_qkv: DoubleArray | Numbers) -> NDArray[np.float64]: ...
@overload
def mhsa_forward(x: ArrayLike, w_qkv: ArrayLike) -> Array: ...


def mhsa_forward(x: ArrayLike, w_qkv: ArrayLike) -> Array:
    """Simplified multi-head self-attention, forward pass.

    Computes ``[Q, K, V] = X @ W`` (split into thirds) and returns ``Y = X + (Q K^T) V``: one head, no scale,
    no softmax, no output projection, no normalisation.

    Parameters
    ----------
    x : array_like, shape (..., N, D)
        The rows to transform. Any leading axes.
    w_qkv : array_like, shape (..., D, 3 * D)
        The three projections side by side. Its leading axes broadcast against those of `x`.

    Returns
    -------
    ndarray, shape (..., N, D)
        A new C-contiguous array of dtype ``numpy.result_type(x, w_qkv)``, lists and integers counting as float64.
        float16 and bfloat16 are computed in float32 and rounded once.

    Raises
    ------
    TypeError
        If a dtype is not float32, float64, float16, bfloat16 or integers, or the two have no common one.
    ValueError
        If the shapes do not fit.

    Notes
    -----
    Up to ``N = D`` the products are taken as written. For longer sequences ``Q (K^T V)`` is cheaper; as Q is
    itself a product, ``X (W_Q (K^T V))`` saves one more pass over the rows. Time is then linear in N, and
    memory is that of the result plus a few megabytes. The reassociation is that of Katharopoulos et al.,
    *Transformers are RNNs*, 2020, with the identity as feature map.

    Examples
    --------
    >>> from fastattn import mhsa_forward
    >>> mhsa_forward([[1, 2], [3, 4]], [[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]])
    array([[ 39.,  56.],
           [ 89., 126.]])
    """
    x, w_qkv = as_floats("x", x), as_floats("w_qkv", w_qkv)
    try:
        dtype = np.result_type(x, w_qkv)
    except TypeError:
        raise TypeError(f"x and w_qkv must have a common dtype, got {x.dtype} and {w_qkv.dtype}") from None
    lead = _check_self_attention(x, w_qkv)
    n_rows, n_features = x.shape[-2:]
    accumulation = accumulation_dtype(dtype)
    weights = np.ascontiguousarray(w_qkv, dtype=accumulation)
    # numpy.broadcast_to costs as much as the arithmetic of a small problem
    x, weights = (
        array if array.shape[:-2] == lead else np.broadcast_to(array, lead + array.shape[-2:]) for array in (x, weights)
    )
    out = np.empty(x.shape, dtype)
    with np.errstate(all="ignore"):
        for box in _boxes(lead, _SCRATCH_SIZE // max(n_rows * n_features, 1)):
            if n_rows <= n_features:
                _self_attend_by_scores(x[box], weights[box], out[box])
            elif not _self_attend_by_state(x[box], weights[box], out[box]):
                for entry in _entries(x[box].shape[:-2]):
                    _self_attend_entry(x[box][entry], weights[box][entry], out[box][entry])
    return out


def _check_self_attention(x: Array, w_qkv: Array) -> tuple[int, ...]:
    """Check the shapes and return the broadcast leading axes."""
    if x.ndim < 2:
        raise ValueError(f"x must have shape (..., N, D), got {x.shape}")
    n_features = x.shape[-1]
    if w_qkv.ndim < 2 or w_qkv.shape[-2:] != (n_features, 3 * n_features):
        dots = "..., " if w_qkv.ndim > 2 else ""
        raise ValueError(
            f"w_qkv must have shape ({dots}{n_features}, {3 * n_features}) to match x with {n_features} features, "
            f"got {w_qkv.shape}"
        )
    try:
        return np.broadcast_shapes(x.shape[:-2], w_qkv.shape[:-2])
    except ValueError:
        raise ValueError(
            f"leading axes of x and w_qkv must broadcast, got {x.shape[:-2]} and {w_qkv.shape[:-2]}"
        ) from None


def _self_attend_by_scores(x: Array, weights: Array, out: Array) -> None:
    """Write ``X + (Q K^T) V`` for a short sequence: x (..., N, D), weights (..., D, 3D)."""
    rows = np.ascontiguousarray(x, dtype=weights.dtype)
    query, key, value = np.split(rows @ weights, 3, axis=-1)
    result = (query @ key.swapaxes(-1, -2)) @ value
    np.add(result, rows, out=out, casting="unsafe")


def _self_attend_entry(x: Array, weights: Array, out: Array) -> None:
    """Write the rows of one entry, by the state if its products stay within the type: x (N, D), weights (D, 3D)."""
    if not _self_attend_by_state(x, weights, out):
        rows = np.ascontiguousarray(x, dtype=weights.dtype)
        query, key, value = (part[np.newaxis] for part in np.split(rows @ weights, 3, axis=-1))
        result = np.empty(query.shape, weights.dtype)
        _attend(query, key, value, result, weights.dtype, False, 1.0, keep_states=False)
        np.add(result[0], rows, out=out, casting="unsafe")


def _self_attend_by_state(x: Array, weights: Array, out: Array) -> bool:
    """Write ``X + X (W_Q (K^T V))`` for a long sequence: x (..., N, D), weights (..., D, 3D).

    Returns False, and leaves rows unwritten, where K^T V leaves the range of the type, and where entries that share
    the call need different ways.
    """
    *lead, n_rows, n_features = x.shape
    dtype = weights.dtype
    query_weights, kv_weights = weights[..., :n_features], weights[..., n_features:]
    step = max(_SCRATCH_SIZE // max(n_features, 1), n_features, 1)
    scratch = np.empty((*lead, min(step, n_rows), 2 * n_features), dtype)
    first, second = scratch[..., :n_features], scratch[..., n_features:]
    state = np.zeros((*lead, n_features, n_features))
    for start in range(0, n_rows, step):
        rows = np.ascontiguousarray(x[..., start : start + step, :], dtype=dtype)
        n_chunk = rows.shape[-2]
        np.matmul(rows, kv_weights, out=scratch[..., :n_chunk, :])
        keys, values = first[..., :n_chunk, :], second[..., :n_chunk, :]
        added = keys.swapaxes(-1, -2) @ values
        if not _fits(added, keys, values):
            return False
        state += added
    folded = query_weights @ state
    # Folding must not lose what the two-step product would keep: its intermediate may leave the dtype's
    # range although the result does not. Half of the exponent's range leaves room for the other factor.
    limits = np.finfo(dtype)
    largest = np.abs(folded).max(axis=(-2, -1), initial=0.0)
    fits = (largest > math.sqrt(limits.tiny)) & (largest < math.sqrt(limits.max))
    if fits.size > 1 and not fits.all():
        return False
    factors = [folded.astype(dtype)] if fits.all() else [query_weights, state.astype(dtype)]
    for start in range(0, n_rows, step):
        rows = result = np.ascontiguousarray(x[..., start : start + step, :], dtype=dtype)
        for factor, buffer in zip(factors, (first, second), strict=False):
            result = np.matmul(result, factor, out=buffer[..., : rows.shape[-2], :])
        np.add(result, rows, out=out[..., start : start + step, :], casting="unsafe")
    return True


@overload
def linear_attention(  # type: ignore[overload-overlap]
    q: NDArray[SmallFloat], k: ArrayLike, v: ArrayLike, *, causal: bool = ..., scale: Real = ...
) -> NDArray[SmallFloat]: ...
@overload
def linear_attention(
    q: DoubleArray | Numbers, k: ArrayLike, v: ArrayLike, *, causal: bool = ..., scale: Real = ...
) -> NDArray[np.float64]: ...
@overload
def linear_attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, *, causal: bool = ..., scale: Real = ...) -> Array: ...


def linear_attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, *, causal: bool = False, scale: Real = 1.0) -> Array:
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
        for box in _boxes(shared, _SCRATCH_SIZE // max(scratch, 1)):
            if _attend(queries[box], keys[box], values[box], results[box], accumulation, causal, factor):
                continue
            for head in _entries(keys[box].shape[:-3]):
                query, key, value, result = (array[box][head] for array in (queries, keys, values, results))
                if not _attend(query, key, value, result, accumulation, causal, factor):
                    _attend(query, key, value, result, accumulation, causal, factor, keep_states=False)
    return out


def _attend(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dtype: np.dtype[Any],
    causal: bool,
    scale: float,
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
        for keys, values in _key_chunks(k, v, prefix, dtype):
            added = keys.swapaxes(-1, -2) @ values
            if not _fits(added, keys, values):
                return False
            state += added
    out[..., :blind, :] = 0
    step = _CAUSAL_ROWS if causal else _QUERY_ROWS
    for start in range(blind, n_queries, step):
        stop = min(start + step, n_queries)
        queries = np.ascontiguousarray(q[..., start:stop, :], dtype=dtype)
        if scale != 1.0:
            queries = queries * scale
        if state is None:
            total = np.zeros((*queries.shape[:-1], v.shape[-1]), dtype)
        else:
            total = queries @ state.astype(dtype, copy=False)
        if not by_state:
            for keys, values in _key_chunks(k, v, prefix if keep_states else prefix + (start - blind) * causal, dtype):
                total += (queries @ keys.swapaxes(-1, -2)) @ values
        if causal:
            beside = slice(prefix + start - blind, prefix + stop - blind)
            keys = np.ascontiguousarray(k[..., beside, :], dtype=dtype)
            values = np.ascontiguousarray(v[..., beside, :], dtype=dtype)
            total += _triangle(queries, keys, values)
            if stop < n_queries and keep_states:
                added = keys.swapaxes(-1, -2) @ values
                if not _fits(added, keys, values):
                    return False
                state = added.astype(np.float64) if state is None else state + added
        out[..., start:stop, :] = total
    return True


def _fits(product: Array, keys: Array, values: Array) -> bool:
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
    scores = queries @ keys.swapaxes(-1, -2)
    np.copyto(scores, 0, where=~np.tri(n_rows, dtype=np.bool_))
    if np.isfinite(values).all():
        return scores @ values
    # 0 * NaN is NaN: with such a value in the chunk each row must leave out what it does not see.
    rows = [scores[..., row : row + 1, : row + 1] @ values[..., : row + 1, :] for row in range(n_rows)]
    return np.concatenate(rows, axis=-2)


def _state_is_cheaper(n_rows: int, n_keys: int, head_dim: int, value_dim: int) -> bool:
    """Compare the multiplications of ``Q (K^T V)`` and ``(Q K^T) V`` for all rows that share a key head."""
    return (n_keys + n_rows) * head_dim * value_dim < n_rows * n_keys * (head_dim + value_dim)


def _key_chunks(k: Array, v: Array, stop: int, dtype: np.dtype[Any]) -> Iterator[tuple[Array, Array]]:
    """Yield the first `stop` keys and values in contiguous chunks of `dtype`."""
    for start in range(0, stop, _KEY_ROWS):
        rows = slice(start, min(start + _KEY_ROWS, stop))
        yield np.ascontiguousarray(k[..., rows, :], dtype=dtype), np.ascontiguousarray(v[..., rows, :], dtype=dtype)


def _entries(lead: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, lead))


def _boxes(lead: tuple[int, ...], n_entries: int) -> Iterator[tuple[slice, ...]]:
    """Cut an index space of shape `lead` into boxes of at most `n_entries` entries, at least one."""
    sides: list[list[slice]] = []
    for length in reversed(lead):
        side = max(1, min(length, n_entries))
        n_entries //= side
        sides.append([slice(start, start + side) for start in range(0, length, side)])
    return itertools.product(*reversed(sides))
