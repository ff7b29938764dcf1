"""`attention`: check, allocate, call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, SupportsIndex, Unpack, overload

import numpy as np
from numpy import empty, ndarray
from numpy.typing import ArrayLike, NDArray

from fastattn._arrays import FLOAT32, Array, accumulation_dtype, check_out
from fastattn._call import call_over_leading
from fastattn._checks import Checked, check_arrays, check_options
from fastattn._dispatch import kernel
from fastattn._options import Options, check_flag, check_scale
from fastattn._progress import check_progress
from fastattn._threads import get_num_threads, threads_of
from fastattn._typing import AttentionOptions, DoubleArray, Numbers, Real, Report, SmallFloat, Window

_ABSENT = object()


def _common_call_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let three float32 arrays without options pay for nothing else.

    Not even for the defaults of keyword-only arguments, which Python looks up one by one: a sixth of a call's time; nor
    for a tuple of arguments, or for looking up names in modules.
    """

    @functools.wraps(function)
    def attention(q: Any = _ABSENT, k: Any = _ABSENT, v: Any = _ABSENT, *more: Any, **options: Any) -> Any:
        if more:
            return function(q, k, v, *more, **options)
        if not options and type(q) is type(k) is type(v) is ndarray and q.dtype is k.dtype is v.dtype is FLOAT32:
            result = kernel.attention_common(q, k, v, empty, FLOAT32, get_num_threads)
            if result is not None:
                return result
        arrays = {name: array for name, array in (("q", q), ("k", k), ("v", v)) if array is not _ABSENT}
        return function(**arrays, **options)

    return attention


@overload
def attention(  # type: ignore[overload-overlap]
    q: NDArray[SmallFloat],
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> NDArray[SmallFloat]: ...
@overload
def attention(
    q: DoubleArray | Numbers,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> NDArray[np.float64]: ...
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[False] = ..., **options: Unpack[AttentionOptions]
) -> Array: ...
@overload
def attention(  # type: ignore[overload-overlap]
    q: NDArray[SmallFloat],
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[NDArray[SmallFloat], NDArray[np.float32]]: ...
@overload
def attention(
    q: DoubleArray | Numbers,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Array | tuple[Array, Array]: ...


@_common_call_first
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_offset: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    scale: Real | None = None,
    softcap: Real | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    num_threads: SupportsIndex | None = None,
    progress: Report | None = None,
) -> Array | tuple[Array, Array]:
    """Exact scaled dot-product attention, ``softmax(scale * q @ k.T) @ v`` per head.

    Scores, softmax and weighted sum are computed block by block (online softmax: Milakov and Gimelshein, 2018;
    tiling as in Dao et al., FlashAttention, 2022), so no array of N x S numbers exists.

    Parameters
    ----------
    q : array_like, shape (..., H, N, D)
        Queries. 2-D is one head (N, D); 3-D is (H, N, D). Any strides; other layouts come as views, such as
        ``x.swapaxes(1, 2)`` of (B, N, H, D). float32, float64, float16 or bfloat16 (ml_dtypes); integers and
        lists become float64.
    k : array_like, shape (..., K, S, D)
        Keys. ``H % K == 0``: query head h reads key/value head ``h // (H // K)``. The dtype of q, or a half type
        with float32 q.
    v : array_like, shape (..., K, S, E)
        Values, of k's dtype. Leading axes of q, k and v broadcast.
    mask : array_like, broadcastable to (..., H, N, S), optional
        bool: True where a query may attend. Float: added to the scores; -inf excludes.
    bias : array_like, broadcastable to (..., H, N, S), optional
        Floats added to the scores, beside mask; -inf excludes.
    causal : bool, default False
        Query i sees key j iff ``j <= i + q_offset``. With N = 2, S = 4::

            1 1 1 0
            1 1 1 1
    window : (left, right), optional
        Distances around the same diagonal that are visible, inclusive; -1 or None (or 2**59 and more) is unbounded.
    q_offset : int or integer array of the leading shape, optional
        Position of query 0 among the keys. Default ``S - N`` (per entry ``kv_lens - N``): the last query sees the
        last key.
    kv_lens : int or integer array of the leading shape, optional
        Number of valid keys per entry; the rest is never read.
    block_table : integer array, shape (..., max_pages), optional
        k and v are pages (P, K, page, D) and (P, K, page, E); an entry's keys are its pages in this order. Needs
        kv_lens.
    scale : float, optional
        Factor of the scores. Default ``1 / sqrt(D)`` (1 when D is 0).
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)`` before anything is added. None or 0 is off.
    alibi_slopes : array_like, shape (H,) or (..., H), optional
        Adds ``-slope * abs(i + q_offset - j)`` (Press et al., 2021).
    sinks : array_like, shape (H,), optional
        One more logit per query head, in the softmax's denominator only.
    out : ndarray, shape (..., H, N, E), optional
        Where to write the result: exact shape, q's dtype, any strides, no overlap with an input.
    return_lse : bool, default False
        Also return the log-sum-exp of each row.
    num_threads : int, optional
        At most so many threads. Default `get_num_threads`. The result does not depend on it.
    progress : callable, optional
        Called by the calling thread as ``progress(done)`` with the fraction of the work that is done, at most ten
        times a second and never with less than before; last with 1.0, when the result is there.

    Returns
    -------
    out : ndarray, shape (..., H, N, E)
        In q's dtype, computed in float32 (float64 for float64). A query that may see nothing gives 0.
    lse : ndarray, shape (..., H, N)
        Only with return_lse: natural log of the softmax's denominator, float32 (float64 for float64); -inf where
        a query sees nothing.

    Raises
    ------
    TypeError
        For a kind or dtype that is not allowed.
    ValueError
        For a shape or value that is not allowed. Nothing is written to out when a call raises.
    MemoryError
        If there is no memory for the result or the scratch. Nothing is written to out.
    KeyboardInterrupt, or what else a signal's handler or progress raises
        The call stops within a fraction of a second. Some rows of out are then done and some as before.

    Examples
    --------
    >>> import numpy as np, fastattn
    >>> q = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> fastattn.attention(q, q, np.eye(2), scale=1.0).round(4)
    array([[0.7311, 0.2689],
           [0.2689, 0.7311]])
    """
    return _attend(
        q,
        k,
        v,
        out=out,
        return_lse=check_flag("return_lse", return_lse),
        scale=scale,
        num_threads=threads_of(num_threads),
        progress=progress,
        mask=mask,
        bias=bias,
        causal=check_flag("causal", causal),
        window=window,
        q_offset=q_offset,
        kv_lens=kv_lens,
        block_table=block_table,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )


def _attend(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    out: Array | None,
    return_lse: bool,
    scale: Real | None,
    num_threads: int,
    progress: Report | None,
    **given: Any,
) -> Array | tuple[Array, Array]:
    """The call with options; `given` are those that `check_options` takes."""
    checked = check_arrays(q, k, v, paged=given["block_table"] is not None)
    options = check_options(checked, **given)
    return attend_checked(
        checked, options, out=out, return_lse=return_lse, scale=scale, num_threads=num_threads, progress=progress
    )


def attend_checked(
    checked: Checked,
    options: Options,
    *,
    out: Any,
    return_lse: bool,
    scale: Any,
    num_threads: int,
    progress: Report | None,
) -> Array | tuple[Array, Array]:
    """What is left of a call once arrays and options are checked: scale, progress, results, kernel."""
    options.progress = check_progress(progress)
    factor = check_scale(scale, checked.q.shape[-1])
    if out is None:
        result = np.empty(checked.out_shape, checked.q.dtype)
    else:
        inputs = {"q": checked.q, "k": checked.k, "v": checked.v, "mask": options.mask, "bias": options.bias}
        if options.scales is not None:
            inputs["k_scales"], inputs["v_scales"] = options.scales
        result = check_out(out, checked.out_shape, checked.q.dtype, inputs)
    lse = np.empty(checked.out_shape[:-1], accumulation_dtype(checked.q.dtype)) if return_lse else None
    heads = (slice(None),) if checked.q.ndim == len(checked.out_shape) else (None,)
    call_over_leading(
        checked.q,
        checked.k,
        checked.v,
        np.asarray(result)[heads],
        None if lse is None else lse[heads],
        factor,
        num_threads,
        options,
    )
    if progress is not None:
        progress(1.0)
    return result if lse is None else (result, lse)
