"""The general function, from its definition."""

from typing import Any, Literal, NamedTuple, TypeAlias, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fastattn._typing import AttentionRules, Real, Window

Array: TypeAlias = NDArray[Any]


class Attended(NamedTuple):
    out: Array  # (..., H, N, E), or (N, E) when every input was 2-D
    lse: Array  # out.shape[:-1]
    visible: Array  # (..., H, N, S) bool: which keys each query may see
    values: Array  # (..., H, S, E): what the weights multiplied, one copy per query head


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    dtype: DTypeLike = ...,
    **options: Unpack[AttentionRules],
) -> Array: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[True],
    dtype: DTypeLike = ...,
    **options: Unpack[AttentionRules],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: bool,
    dtype: DTypeLike = ...,
    **options: Unpack[AttentionRules],
) -> Array | tuple[Array, Array]: ...


def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = None, bias: ArrayLike | None = None,
    causal: bool = False, window: Window | None = None, q_offset: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None, block_table: ArrayLike | None = None, scale: Real | None = None,
    softcap: Real | None = None, alibi_slopes: ArrayLike | None = None, sinks: ArrayLike | None = None,
    return_lse: bool = False, dtype: DTypeLike = np.float64,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """Compute ``softmax(scale * q kᵀ + ...) v`` with the whole score matrix in memory.

    Parameters
    ----------
    q, k, v : array_like
        Queries (..., H, N, D), keys (..., K, S, D), values (..., K, S, E); leading axes broadcast and K divides H.
        2-D is one head. With `block_table`, k and v are pages (P, K, page, D) and (P, K, page, E).
    mask, bias : array_like, optional
        Broadcast to (..., H, N, S). A bool mask is True where a query may attend; floats are added, -inf excludes.
    causal : bool, default False
        Query i sees key j only if ``j <= i + q_offset``.
    window : (left, right), optional
        Inclusive distances around the diagonal ``j == i + q_offset``; None or -1 is unbounded.
    q_offset : int or array_like of int, optional
        Position of query 0 among the keys, one for all or one per leading entry. Default ``kv_lens - N`` or ``S - N``.
    kv_lens : int or array_like of int, optional
        Number of valid keys, one for all or one per leading entry.
    block_table : array_like of int, optional
        Page numbers (B, max_pages) of the keys of each entry, in order. Needs `kv_lens`.
    scale : float, optional
        Default ``1 / sqrt(D)``, or 1 if D is 0.
    softcap : float, optional
        Replaces each scaled score s by ``softcap * tanh(s / softcap)``. None or 0 is off.
    alibi_slopes : array_like, optional
        (H,) or (B, H): adds ``-slope * abs(i + q_offset - j)``.
    sinks : array_like, optional
        (H,): a logit per query head that takes part in the denominator only.
    return_lse : bool, default False
        Also return the natural logarithm of the softmax denominator.
    dtype : data-type, default float64
        The type that everything is computed and returned in.

    Returns
    -------
    out : ndarray (..., H, N, E)
    lse : ndarray (..., H, N)
        Only with `return_lse`. A query that sees no key gives 0 and -inf, or 0 and its sink.

    Raises
    ------
    TypeError
        For a mask of integers, or a bias that is not of floats.
    ValueError
        For shapes that do not fit together, or `block_table` without `kv_lens`.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, equation 1. Heads: Ainslie et al., "GQA", 2023. ALiBi: Press et
    al., "Train Short, Test Long", 2022. Softcap: "Gemma 2", 2024. Sinks: Miller, "Attention Is Off By One", 2023.

    Examples
    --------
    >>> from fastattn import reference
    >>> print(reference.attention([[0.0], [0.0]], [[1.0], [2.0]], [[4.0], [8.0]], causal=True))
    [[4.]
     [6.]]
    """
    out, lse, _, _ = attend(
        q, k, v, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset, kv_lens=kv_lens,
        block_table=block_table, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dtype=dtype,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attend(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = None, bias: ArrayLike | None = None,
    causal: bool = False, window: Window | None = None, q_offset: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None, block_table: ArrayLike | None = None, scale: Real | None = None,
    softcap: Real | None = None, alibi_slopes: ArrayLike | None = None, sinks: ArrayLike | None = None,
    dtype: DTypeLike = np.float64,
) -> Attended:  # fmt: skip
    """Do what `attention` says, and tell which keys were seen."""
    number: Any = np.dtype(dtype).type
    limit = _largest_addend(np.asarray(q).dtype, np.dtype(dtype))
    q, k, v = (np.asarray(array).astype(dtype) for array in (q, k, v))
    if block_table is not None:
        k, v = (_gather_pages(pages, block_table, kv_lens) for pages in (k, v))
    one_head = q.ndim == k.ndim == v.ndim == 2
    q, k, v = (array[None] if array.ndim == 2 else array for array in (q, k, v))
    n_heads, n_queries, head_dim = map(int, q.shape[-3:])
    n_keys = int(k.shape[-2])
    k, v = (repeat_heads(array, n_heads) for array in (k, v))
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    shape = (*lead, n_heads, n_queries, n_keys)

    lengths = _per_entry(n_keys if kv_lens is None else kv_lens, lead)
    offset = lengths - n_queries if q_offset is None else _per_entry(q_offset, lead)
    # (..., 1, N, S): how far a key lies before the position of its query
    distance = np.arange(n_queries)[:, None] + offset - np.arange(n_keys)
    visible: NDArray[np.bool_] = np.broadcast_to(np.arange(n_keys) < lengths, shape)
    if causal:
        visible = visible & (distance >= 0)
    if window is not None:
        left, right = (None if side is None or side == -1 else int(side) for side in window)
        visible = visible if left is None else visible & (distance <= left)
        visible = visible if right is None else visible & (distance >= -right)

    with np.errstate(all="ignore"):
        if scale is None:
            scale = 1 / np.sqrt(number(head_dim)) if head_dim else 1.0
        scores = q @ k.swapaxes(-1, -2) * number(scale)
        if softcap:
            scores = number(softcap) * np.tanh(scores / number(softcap))
        if alibi_slopes is not None:
            slopes = np.asarray(alibi_slopes).astype(dtype)[..., None, None]
            scores = scores - slopes * np.abs(distance).astype(dtype)
        if bias is not None and np.asarray(bias).dtype == np.bool_:
            raise TypeError("bias must hold floats to add, got bool")
        for addend in (np.asarray(given) for given in (bias, mask) if given is not None):
            if addend.dtype == np.bool_:
                visible = visible & addend
            else:
                number_to_add, keep = _split_addend(addend, limit, dtype)
                scores, visible = scores + number_to_add, visible & keep
        weights, lse = softmax(np.broadcast_to(scores, shape), visible, sinks)
        out = weighted_sum(weights, visible, v)
    return Attended(out[0], lse[0], visible, v) if one_head else Attended(out, lse, visible, v)


def _per_entry(integers: ArrayLike, lead: tuple[int, ...]) -> NDArray[np.int64]:
    """Give every leading entry its integer, in a shape (..., 1, 1, 1) that goes with the scores."""
    return np.broadcast_to(np.asarray(integers, np.int64), lead)[..., None, None, None]


def _largest_addend(query_dtype: np.dtype[Any], dtype: np.dtype[Any]) -> float:
    """Return the number that finite mask values are clamped to: the largest of the type that sums are kept in."""
    in_double = query_dtype.kind in "biu" or query_dtype.itemsize > 4
    accumulation = np.finfo(np.float64 if in_double else np.float32)
    return float(min(accumulation.max, np.finfo(dtype).max))


def _split_addend(addend: Array, limit: float, dtype: DTypeLike) -> tuple[Array, Array]:
    """Return what a float mask or a bias adds to the scores, and where it keeps a key (-inf excludes)."""
    if addend.dtype.kind not in "fV":  # bfloat16 is an extension type, kind "V"
        raise TypeError(f"mask must hold bool for keep/drop or float to add, bias float, got {addend.dtype}")
    wide = addend.astype(np.promote_types(addend.dtype, np.float64))
    return np.where(np.isinf(wide), wide, np.clip(wide, -limit, limit)).astype(dtype), ~np.isneginf(wide)


def _gather_pages(pages: Array, block_table: ArrayLike, kv_lens: ArrayLike | None) -> Array:
    """Lay pages (P, K, page, D) out as (..., K, max_pages * page, D). Entries past kv_lens become zeros, unread."""
    if kv_lens is None:
        raise ValueError("block_table needs kv_lens, got kv_lens=None")
    n_pages, n_heads, page_size, features = pages.shape
    table = np.asarray(block_table)
    in_use = np.arange(int(table.shape[-1])) * page_size < np.asarray(kv_lens, np.int64)[..., None]
    with_empty_page = np.concatenate([pages, np.zeros((1, *pages.shape[1:]), pages.dtype)])
    gathered = with_empty_page[np.where(in_use, table, n_pages).astype(np.intp)]  # (..., max_pages, K, page, D)
    lead = gathered.shape[:-4]
    return gathered.swapaxes(-4, -3).reshape(*lead, n_heads, table.shape[-1] * page_size, features)


def repeat_heads(array: Array, n_heads: int) -> Array:
    """Copy every key/value head for the group of query heads that reads it: (..., K, S, D) to (..., H, S, D)."""
    n_kv_heads = array.shape[-3]
    if n_heads != n_kv_heads and (n_kv_heads == 0 or n_heads % n_kv_heads):
        raise ValueError(f"key/value heads must divide the {n_heads} query heads, got {n_kv_heads}")
    return array if n_heads == n_kv_heads else np.repeat(array, n_heads // n_kv_heads, axis=-3)


def softmax(scores: Array, visible: Array, sinks: ArrayLike | None) -> tuple[Array, Array]:
    """Return the weights (..., H, N, S), 0 at unseen keys, and the logarithm of their denominator (..., H, N)."""
    no_sink = scores.dtype.type(-np.inf)
    sink = no_sink if sinks is None else np.asarray(sinks).astype(scores.dtype)[..., None, None]
    # Selection, not addition of -inf: an unseen NaN must vanish.
    scores = np.where(visible, scores, no_sink)
    top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    weights = np.where(visible, np.exp(scores - top), scores.dtype.type(0))
    total: Array = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sink - top)
    empty = ~visible.any(axis=-1, keepdims=True)
    lse = np.where(empty, sink, top + np.log(total))
    return weights / np.where(empty, scores.dtype.type(1), total), lse[..., 0]


def weighted_sum(weights: Array, visible: Array, values: Array) -> Array:
    """Return weights @ values, where a NaN or inf value counts only in the rows that see its key."""
    finite = np.isfinite(values)
    out = weights @ np.where(finite, values, values.dtype.type(0))
    key_axis = values.ndim - 2
    other_axes = tuple(axis for axis in range(values.ndim) if axis != key_axis)
    for key in np.flatnonzero(~finite.all(axis=other_axes)):
        term = weights[..., :, key, None] * values[..., None, key, :]
        counts = visible[..., :, key, None] & ~finite[..., None, key, :]
        out = out + np.where(counts, term, values.dtype.type(0))
    return out
