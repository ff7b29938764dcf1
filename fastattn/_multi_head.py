"""Attention over a feature axis that holds all heads side by side."""

from __future__ import annotations

import operator
from typing import Any, Literal, SupportsIndex, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastattn._arrays import Array, as_floats
from fastattn._attention import attention
from fastattn._typing import AttentionOptions, DoubleArray, Numbers, SmallFloat


def _head_count(name: str, value: SupportsIndex) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}")
    return count


def _split(name: str, array: Array, n_heads: int) -> Array:
    """(..., n, heads * d) as (..., heads, n, d), a view."""
    if array.ndim < 2:
        raise ValueError(f"{name} must have shape (..., rows, features), got {array.shape}")
    if array.shape[-1] % n_heads:
        raise ValueError(f"{name}'s {array.shape[-1]} features must divide into {n_heads} heads")
    return array.reshape(*array.shape[:-1], n_heads, array.shape[-1] // n_heads).swapaxes(-2, -3)


@overload
def multi_head_attention(  # type: ignore[overload-overlap]
    q: NDArray[SmallFloat],
    k: ArrayLike,
    v: ArrayLike,
    num_heads: SupportsIndex,
    *,
    num_kv_heads: SupportsIndex | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> NDArray[SmallFloat]: ...
@overload
def multi_head_attention(
    q: DoubleArray | Numbers,
    k: ArrayLike,
    v: ArrayLike,
    num_heads: SupportsIndex,
    *,
    num_kv_heads: SupportsIndex | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> NDArray[np.float64]: ...
@overload
def multi_head_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    num_heads: SupportsIndex,
    *,
    num_kv_heads: SupportsIndex | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Array: ...
@overload
def multi_head_attention(  # type: ignore[overload-overlap]
    q: NDArray[SmallFloat],
    k: ArrayLike,
    v: ArrayLike,
    num_heads: SupportsIndex,
    *,
    num_kv_heads: SupportsIndex | None = ...,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[NDArray[SmallFloat], NDArray[np.float32]]: ...
@overload
def multi_head_attention(
    q: DoubleArray | Numbers,
    k: ArrayLike,
    v: ArrayLike,
    num_heads: SupportsIndex,
    *,
    num_kv_heads: SupportsIndex | None = ...,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...
@overload
def multi_head_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    num_heads: SupportsIndex,
    *,
    num_kv_heads: SupportsIndex | None = ...,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...
@overload
def multi_head_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    num_heads: SupportsIndex,
    *,
    num_kv_heads: SupportsIndex | None = ...,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Array]: ...


def multi_head_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    num_heads: SupportsIndex,
    *,
    num_kv_heads: SupportsIndex | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """Multi-head attention without projections: split the features into heads, attend, concatenate.

    Per head h, ``softmax(Q_h K_h.T / sqrt(d / num_heads)) V_h`` (Vaswani et al., 2017).

    Parameters
    ----------
    q : array_like, shape (..., N, d)
        Queries; d divides into num_heads.
    k : array_like, shape (..., S, d_k)
        Keys; d_k / num_kv_heads equals d / num_heads.
    v : array_like, shape (..., S, d_v)
        Values; d_v divides into num_kv_heads.
    num_heads : int
        Query heads.
    num_kv_heads : int, optional
        Key/value heads; divides num_heads. Default num_heads.
    out : ndarray, shape of the result, optional
        Where to write it: q's dtype, no overlap with an input.
    return_lse : bool, default False
        Also return the log-sum-exp of each row.
    **options
        The others of `attention`; masks have shape (..., H, N, S).

    Returns
    -------
    out : ndarray, shape (..., N, num_heads * d_v / num_kv_heads)
    lse : ndarray, shape (..., num_heads, N)
        Only with return_lse.

    Raises
    ------
    TypeError, ValueError
        As `attention`; also when the features do not divide into heads.

    Examples
    --------
    >>> import fastattn
    >>> q = [[1, 0, 0, 1], [0, 1, 1, 0]]
    >>> fastattn.multi_head_attention(q, q, [[1, 2, 3, 4], [5, 6, 7, 8]], 2).round(4)
    array([[2.321, 3.321, 4.321, 5.321],
           [3.679, 4.679, 5.679, 6.679]])
    """
    n_heads = _head_count("num_heads", num_heads)
    n_kv_heads = n_heads if num_kv_heads is None else _head_count("num_kv_heads", num_kv_heads)
    if n_heads % n_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {n_heads} and {n_kv_heads}")
    split_q = _split("q", as_floats("q", q), n_heads)
    split_k = _split("k", as_floats("k", k), n_kv_heads)
    split_v = _split("v", as_floats("v", v), n_kv_heads)
    if out is None:
        try:
            paged = options.get("block_table") is not None
            leads = [x.shape[:-3] for x in (split_q, split_k, split_v)]
            lead = leads[0] if paged else np.broadcast_shapes(*leads)
        except ValueError:
            lead = split_q.shape[:-3]  # `attention` refuses it by name
        out = np.empty((*lead, split_q.shape[-2], n_heads * split_v.shape[-1]), split_q.dtype)
    elif not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}")
    expected = (split_q.shape[-2], n_heads * split_v.shape[-1])
    if out.shape[-2:] != expected:
        raise ValueError(f"out must have shape (..., {expected[0]}, {expected[1]}), got {out.shape}")
    result = attention(split_q, split_k, split_v, out=_split("out", out, n_heads), return_lse=return_lse, **options)
    return (out, result[1]) if isinstance(result, tuple) else out
