"""Attention in other layouts and in pieces, each reduced to the general function."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from fastattn._typing import AttentionRules, PackedRules, Real

from ._attention import Array, attend, softmax, weighted_sum


@overload
def multi_head_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    num_heads: int,
    *,
    num_kv_heads: int | None = ...,
    return_lse: Literal[False] = ...,
    dtype: DTypeLike = ...,
    **options: Unpack[AttentionRules],
) -> Array: ...
@overload
def multi_head_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    num_heads: int,
    *,
    num_kv_heads: int | None = ...,
    return_lse: Literal[True],
    dtype: DTypeLike = ...,
    **options: Unpack[AttentionRules],
) -> tuple[Array, Array]: ...
@overload
def multi_head_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    num_heads: int,
    *,
    num_kv_heads: int | None = ...,
    return_lse: bool,
    dtype: DTypeLike = ...,
    **options: Unpack[AttentionRules],
) -> Array | tuple[Array, Array]: ...


def multi_head_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, num_heads: int, *, num_kv_heads: int | None = None,
    return_lse: bool = False, **options: Any,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """Split the columns into heads, attend with each, and put the heads side by side again.

    Parameters
    ----------
    q, k, v : array_like
        (..., N, H * D), (..., S, K * D) and (..., S, K * E). There is no projection.
    num_heads, num_kv_heads : int
        H and K; `num_kv_heads` defaults to `num_heads`.
    return_lse : bool, default False
        Also return the (..., H, N) logarithms of the softmax denominators.
    **options
        As for `attention`.

    Returns
    -------
    out : ndarray (..., N, H * E)
    lse : ndarray (..., H, N), only with `return_lse`

    Raises
    ------
    ValueError
        If the head counts do not divide the numbers of columns.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

    Examples
    --------
    >>> from fastattn import reference
    >>> q = [[1, 0, 0, 1], [0, 1, 1, 0]]
    >>> print(reference.multi_head_attention(q, q, [[1, 2, 3, 4], [5, 6, 7, 8]], 2).round(4))
    [[2.321 3.321 4.321 5.321]
     [3.679 4.679 5.679 6.679]]
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    counts = (num_heads, num_kv_heads, num_kv_heads)
    result = attend(*(_split_columns(np.asarray(x), n) for x, n in zip((q, k, v), counts, strict=True)), **options)
    *lead, n_heads, n_queries, value_dim = result.out.shape
    out = result.out.swapaxes(-3, -2).reshape(*lead, n_queries, n_heads * value_dim)
    return (out, result.lse) if return_lse else out


def _split_columns(rows: Array, n_heads: int) -> Array:
    """View (..., N, H * D) as (..., H, N, D)."""
    *lead, n_rows, n_columns = rows.shape
    return rows.reshape(*lead, n_rows, n_heads, n_columns // n_heads).swapaxes(-3, -2)


def scaled_dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attn_mask: ArrayLike | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Real | None = None, enable_gqa: bool = False, dtype: DTypeLike = np.float64,
) -> Array:  # fmt: skip
    """Attend with PyTorch's arguments: the causal diagonal starts at the first query and the first key.

    Parameters
    ----------
    query, key, value : array_like
        (..., H, N, D), (..., K, S, D) and (..., K, S, E).
    attn_mask : array_like, optional
        True where a query may attend, or floats to add. Not together with `is_causal`.
    dropout_p : float
        Must be 0.
    is_causal : bool, default False
        Query i sees key j only if ``j <= i``, whatever N and S are.
    scale, dtype
        As for `attention`.
    enable_gqa : bool, default False
        Allow K other than H and 1.

    Returns
    -------
    ndarray (..., H, N, E)

    Raises
    ------
    ValueError
        If the arguments do not go together.

    References
    ----------
    The documentation of ``torch.nn.functional.scaled_dot_product_attention``.

    Examples
    --------
    >>> from fastattn import reference
    >>> print(reference.scaled_dot_product_attention([[0.0]], [[1.0], [2.0]], [[4.0], [8.0]], is_causal=True))
    [[4.]]
    """
    if dropout_p != 0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must be None when is_causal is set")
    n_heads, n_kv_heads = (np.shape(array)[-3] if np.ndim(array) > 2 else 1 for array in (query, key))
    if n_kv_heads not in (n_heads, 1) and not enable_gqa:
        raise ValueError(f"{n_heads} query heads with {n_kv_heads} key/value heads need enable_gqa=True")
    return attend(query, key, value, mask=attn_mask, causal=is_causal, q_offset=0, scale=scale, dtype=dtype).out


@overload
def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = ...,
    *,
    return_lse: Literal[False] = ...,
    dtype: DTypeLike = ...,
    **options: Unpack[PackedRules],
) -> Array: ...
@overload
def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = ...,
    *,
    return_lse: Literal[True],
    dtype: DTypeLike = ...,
    **options: Unpack[PackedRules],
) -> tuple[Array, Array]: ...
@overload
def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = ...,
    *,
    return_lse: bool,
    dtype: DTypeLike = ...,
    **options: Unpack[PackedRules],
) -> Array | tuple[Array, Array]: ...


def attention_varlen(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike | None = None, *,
    return_lse: bool = False, dtype: DTypeLike = np.float64, **options: Any,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """Attend within each member of a packed batch, one call of `attention` after the other.

    Parameters
    ----------
    q, k, v : array_like
        Packed rows (T, H, D), (U, K, D) and (U, K, E).
    cu_seqlens_q, cu_seqlens_k : array_like of int
        Boundaries from 0 to T and from 0 to U: member m owns rows ``[cu[m], cu[m + 1])``. The keys' default to the
        queries'.
    return_lse : bool, default False
        Also return the (T, H) logarithms of the softmax denominators.
    dtype
        As for `attention`.
    **options
        `causal`, `window`, `scale`, `softcap`, `alibi_slopes` and `sinks` of `attention`.

    Returns
    -------
    out : ndarray (T, H, E)
    lse : ndarray (T, H), only with `return_lse`

    Raises
    ------
    ValueError
        If the two lists of boundaries differ in length.

    Examples
    --------
    >>> from fastattn import reference
    >>> rows = [[[0.0]], [[0.0]], [[0.0]]]
    >>> print(reference.attention_varlen(rows, rows, [[[3.0]], [[5.0]], [[8.0]]], [0, 2, 3]).ravel())
    [4. 4. 8.]
    """
    q, k, v = (np.asarray(array) for array in (q, k, v))
    edges_q = [int(edge) for edge in np.asarray(cu_seqlens_q)]
    edges_k = edges_q if cu_seqlens_k is None else [int(edge) for edge in np.asarray(cu_seqlens_k)]
    out = np.zeros((*q.shape[:2], v.shape[-1]), dtype)
    lse = np.zeros(q.shape[:2], dtype)
    for q0, q1, k0, k1 in zip(edges_q[:-1], edges_q[1:], edges_k[:-1], edges_k[1:], strict=True):
        rows = (array.swapaxes(0, 1) for array in (q[q0:q1], k[k0:k1], v[k0:k1]))
        member = attend(*rows, dtype=dtype, **options)
        out[q0:q1], lse[q0:q1] = member.out.swapaxes(0, 1), member.lse.T
    return (out, lse) if return_lse else out


def merge_states(
    outs: Sequence[ArrayLike], lses: Sequence[ArrayLike], *, dtype: DTypeLike = np.float64
) -> tuple[Array, Array]:
    """Combine the results of attention over disjoint sets of keys into the result over all of them.

    Parameters
    ----------
    outs : sequence of array_like (..., E)
    lses : sequence of array_like (...)
        Natural logarithms of the softmax denominators. A state with -inf counts for nothing, whatever its `out` holds.
    dtype
        As for `attention`.

    Returns
    -------
    out : ndarray (..., E)
    lse : ndarray (...)
        0 and -inf where every state is empty.

    Raises
    ------
    ValueError
        If shapes differ or there is no state.

    References
    ----------
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn import reference
    >>> out, lse = reference.merge_states([[[4.0]], [[8.0]]], [[0.0], [np.log(3.0)]])
    >>> print(out.round(6), np.exp(lse).round(6))
    [[7.]] [4.]
    """
    # Each state is one key: its lse is the score and its out the value.
    logits = np.stack([np.asarray(lse).astype(dtype) for lse in lses], axis=-1)[..., None, :]  # (..., 1, states)
    values = np.stack([np.asarray(out).astype(dtype) for out in outs], axis=-2)  # (..., states, E)
    visible = ~np.isneginf(logits)
    with np.errstate(all="ignore"):
        weights, lse = softmax(logits, visible, None)
        out = weighted_sum(weights, visible, values)
    return out[..., 0, :], lse[..., 0]
