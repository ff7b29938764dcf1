"""Attention over packed batches of sequences of different lengths."""

from __future__ import annotations

from typing import Any, Literal, SupportsIndex, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastattn._arrays import FLOAT64, KINDS, Array, accumulation_dtype, as_array, check_out, int64_array
from fastattn._call import call_kernel
from fastattn._checks import check_arrays
from fastattn._options import (
    Options,
    Sizes,
    check_flag,
    check_per_head,
    check_scale,
    check_slopes,
    check_softcap,
    check_window,
)
from fastattn._progress import check_progress
from fastattn._threads import threads_of
from fastattn._typing import DoubleArray, Numbers, PackedOptions, Real, Report, SmallFloat, Window


def _check_bounds(name: str, value: Any, total: int) -> Array:
    """Boundaries of the members: integers from 0 to total, non-decreasing."""
    array = int64_array(name, value)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must have shape (members + 1,), got {array.shape}")
    if array[0] != 0:
        raise ValueError(f"{name} must start at 0, got {array[0]}")
    if array[-1] != total:
        raise ValueError(f"{name} must end at {total}, the number of packed tokens, got {array[-1]}")
    if (array[1:] < array[:-1]).any():
        at = int(np.argmax(array[1:] < array[:-1]))
        raise ValueError(f"{name} must not decrease, got {array[at]} before {array[at + 1]}")
    return array


@overload
def attention_varlen(  # type: ignore[overload-overlap]
    q: NDArray[SmallFloat],
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[PackedOptions],
) -> NDArray[SmallFloat]: ...
@overload
def attention_varlen(
    q: DoubleArray | Numbers,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[PackedOptions],
) -> NDArray[np.float64]: ...
@overload
def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[PackedOptions],
) -> Array: ...
@overload
def attention_varlen(  # type: ignore[overload-overlap]
    q: NDArray[SmallFloat],
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[PackedOptions],
) -> tuple[NDArray[SmallFloat], NDArray[np.float32]]: ...
@overload
def attention_varlen(
    q: DoubleArray | Numbers,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[PackedOptions],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...
@overload
def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[PackedOptions],
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
    **options: Unpack[PackedOptions],
) -> Array | tuple[Array, Array]: ...


def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: Real | None = None,
    softcap: Real | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    num_threads: SupportsIndex | None = None,
    progress: Report | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of each member of a packed batch with itself, as one pool of work.

    Member m has queries ``q[cu_seqlens_q[m]:cu_seqlens_q[m + 1]]`` and keys and values
    ``k[cu_seqlens_k[m]:cu_seqlens_k[m + 1]]``; its rows of the result are what `attention` gives for it alone.

    Parameters
    ----------
    q : array_like, shape (T, H, D)
        Packed queries; dtypes as for `attention`.
    k : array_like, shape (U, K, D)
        Packed keys, ``H % K == 0``.
    v : array_like, shape (U, K, E)
        Packed values.
    cu_seqlens_q : integer array_like, shape (members + 1,)
        Where members begin and end: from 0 to T, not decreasing. Members may be empty.
    cu_seqlens_k : integer array_like, shape (members + 1,), optional
        The same for keys, from 0 to U. Default: cu_seqlens_q.
    causal, window, scale, softcap, sinks, num_threads, progress : optional
        As for `attention`; causal is end-aligned in each member.
    alibi_slopes : array_like, shape (H,), optional
        As for `attention`.
    out : ndarray, shape (T, H, E), optional
        Where to write the result.
    return_lse : bool, default False
        Also return the log-sum-exp of each row.

    Returns
    -------
    out : ndarray, shape (T, H, E)
    lse : ndarray, shape (T, H)
        Only with return_lse.

    Raises
    ------
    TypeError, ValueError
        As `attention`; also for boundaries that do not start at 0, decrease, or do not end at T (or U).

    Examples
    --------
    >>> import numpy as np, fastattn
    >>> x = np.ones((5, 2, 4), np.float32)
    >>> fastattn.attention_varlen(x, x, x, [0, 3, 3, 5]).shape
    (5, 2, 4)
    """
    causal, return_lse = check_flag("causal", causal), check_flag("return_lse", return_lse)
    threads = threads_of(num_threads)
    arrays = [as_array(name, array) for name, array in (("q", q), ("k", k), ("v", v))]
    for name, array in zip("qkv", arrays, strict=True):
        if array.ndim != 3:
            raise ValueError(f"{name} must have shape (tokens, heads, features), got {array.shape}")
    checked = check_arrays(*(array.swapaxes(0, 1) for array in arrays), paged=False)
    bounds_q = _check_bounds("cu_seqlens_q", cu_seqlens_q, checked.q.shape[1])
    bounds_k = _check_bounds("cu_seqlens_k", cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, checked.k.shape[1])
    if bounds_q.shape != bounds_k.shape:
        raise ValueError(f"cu_seqlens_k must have shape {bounds_q.shape}, as cu_seqlens_q, got {bounds_k.shape}")
    sizes = Sizes((), checked.q.shape[0], checked.q.shape[1], checked.k.shape[1])
    options = Options(computing_kind=KINDS["float64" if checked.q.dtype == FLOAT64 else "float32"])
    options.query_bounds, options.key_bounds, options.progress = bounds_q, bounds_k, check_progress(progress)
    options.longest_queries = int(np.diff(bounds_q).max(initial=0))
    options.longest_keys = int(np.diff(bounds_k).max(initial=0))
    options.left, options.right = check_window(window, causal)
    options.softcap = check_softcap(softcap)
    if alibi_slopes is not None:
        options.slopes = np.tile(check_slopes(alibi_slopes, sizes), len(bounds_q) - 1)
    if sinks is not None:
        options.sinks = check_per_head("sinks", sinks, sizes, per_entry=False)
    factor = check_scale(scale, checked.q.shape[-1])
    shape = (checked.out_shape[1], checked.out_shape[0], checked.out_shape[2])
    inputs: dict[str, Array | None] = {"q": checked.q, "k": checked.k, "v": checked.v}
    result = np.empty(shape, checked.q.dtype) if out is None else check_out(out, shape, checked.q.dtype, inputs)
    lse = np.empty(shape[:-1], accumulation_dtype(checked.q.dtype)) if return_lse else None
    call_kernel(
        checked.q[None],
        checked.k[None],
        checked.v[None],
        result.swapaxes(0, 1)[None],
        None if lse is None else lse.swapaxes(0, 1)[None],
        factor,
        threads,
        options,
    )
    if progress is not None:
        progress(1.0)
    return result if lse is None else (result, lse)
