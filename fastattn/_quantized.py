"""int8 keys and values: rows of codes with one scale each, and attention that reads them as they are."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from fastattn._arrays import FLOAT32, FLOAT64, INT8, Array, as_array, float_kind
from fastattn._attention import attend_checked
from fastattn._checks import check_options, check_shapes
from fastattn._options import check_flag
from fastattn._threads import threads_of
from fastattn._typing import Real, Report, Window

LARGEST_CODE = 127


def quantize_rows(x: Any) -> tuple[Array, Array]:
    """Round each row to int8, symmetrically: ``codes * scales[..., None]`` is x again, up to half a step per element.

    A row's scale, its step, is its largest magnitude divided by 127, so that element is off by at most 1/254 of the
    largest of its row (and by 1e-7 of that for rounding). Below magnitudes of 127 times the smallest normal float32
    (1.5e-36) the scale itself is rounded up to a subnormal number, and half a step may be more.

    Parameters
    ----------
    x : array_like, shape (..., D)
        float32, float64, float16 or bfloat16, every number finite and within float32's range.

    Returns
    -------
    codes : int8 ndarray, shape (..., D)
        -127 ... 127.
    scales : float32 ndarray, shape (...)
        0 for a row of zeros, whose codes are 0.

    Raises
    ------
    TypeError
        For another dtype, or a single number.
    ValueError
        For NaN, infinity, and numbers beyond float32's range.

    Examples
    --------
    >>> import numpy as np
    >>> quantize_rows(np.array([[1.27, -0.5, 0.004], [0.0, 0.0, 0.0]]))[0]
    array([[127, -50,   0],
           [  0,   0,   0]], dtype=int8)
    """
    array = as_array("x", x)
    if float_kind(array.dtype) is None:
        raise TypeError(f"x must be float32, float64, float16 or bfloat16, got {array.dtype}")
    if array.ndim == 0:
        raise TypeError("x must have rows, shape (..., D), got a single number")
    rows: Array = array.astype(FLOAT64 if array.dtype == FLOAT64 else FLOAT32, copy=False)
    largest = np.abs(rows).max(axis=-1, initial=0)
    allowed = largest <= np.finfo(FLOAT32).max
    if not allowed.all():
        wrong = rows[~(np.abs(rows) <= np.finfo(FLOAT32).max)]
        raise ValueError(f"x must be finite and within float32's range to be quantized, got {wrong[0]}")
    steps = largest.astype(FLOAT64) / LARGEST_CODE
    scales = np.asarray(steps, FLOAT32)
    tiny = (steps != 0) & (scales < np.finfo(FLOAT32).smallest_normal)
    if tiny.any():  # rounded up, or a code would be above 127
        too_small = tiny & (scales.astype(FLOAT64) * LARGEST_CODE < largest)
        scales = np.where(too_small, np.nextafter(scales, FLOAT32.type(1)), scales)
    steps = np.where(scales == 0, 1, scales).astype(rows.dtype)
    return np.rint(rows / steps[..., None]).astype(INT8), scales


def _check_codes(name: str, codes: Any, scales: Any) -> tuple[Array, Array]:
    """int8 codes and their float32 scales, both as arrays."""
    codes, scales = as_array(name, codes), as_array(f"{name}_scales", scales)
    if codes.dtype != INT8:
        raise TypeError(f"{name} must be int8 codes, got {codes.dtype}")
    if scales.dtype != FLOAT32:
        raise TypeError(f"{name}_scales must be float32, got {scales.dtype}")
    if scales.shape != codes.shape[:-1]:
        raise ValueError(f"{name}_scales must have shape {codes.shape[:-1]}, one per row of {name}, got {scales.shape}")
    return codes, scales


def quantized_attention(
    q: ArrayLike,
    k_codes: ArrayLike,
    k_scales: ArrayLike,
    v_codes: ArrayLike,
    v_scales: ArrayLike,
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
    """`attention` on quantized keys and values, read as they are: a quarter of float32's bytes.

    The result is that of `attention` on ``codes * scales[..., None]``, within its accuracy. Against the keys and
    values before they were quantized, a value is off by at most 1/254 of the largest of its row, and so is a mean of
    values; a score moves by at most ``scale * sum(abs(q)) * max(abs(k)) / 254``.

    Parameters
    ----------
    q : float32 array_like, shape (..., H, N, D)
        Queries.
    k_codes : int8 array_like, shape (..., K, S, D), or pages (P, K, page, D)
        Keys as `quantize_rows` makes them. Any strides; fastest where the last axis is contiguous.
    k_scales : float32 array_like, shape ``k_codes.shape[:-1]``
        Finite where the key is attended, anything elsewhere. Any strides.
    v_codes, v_scales : array_like
        Values, likewise, of shape (..., K, S, E).
    mask, bias, causal, window, q_offset, kv_lens, block_table, scale, softcap, alibi_slopes, sinks : optional
        As for `attention`.
    out, return_lse, num_threads, progress : optional
        As for `attention`.

    Returns
    -------
    out : float32 ndarray, shape (..., H, N, E)
    lse : float32 ndarray, shape (..., H, N)
        Only with return_lse.

    Raises
    ------
    TypeError, ValueError
        As `attention`; also for codes that are not int8, scales that are not float32 or not one per row.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.float32([[1, 0]]), np.float32([[1, 0], [0, 1]]), np.float32([[2, -4], [6, 8]])
    >>> quantized_attention(q, *quantize_rows(k), *quantize_rows(v), scale=0.0).round(2)
    array([[4., 2.]], dtype=float32)
    """
    queries = as_array("q", q)
    if queries.dtype != FLOAT32:
        raise TypeError(f"q must be float32 beside int8 keys and values, got {queries.dtype}")
    keys, key_scales = _check_codes("k", k_codes, k_scales)
    values, value_scales = _check_codes("v", v_codes, v_scales)
    checked = check_shapes(queries, keys, values, paged=block_table is not None)
    options = check_options(
        checked,
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
    options.scales = (
        np.broadcast_to(key_scales, checked.k.shape[:-1]),
        np.broadcast_to(value_scales, checked.v.shape[:-1]),
    )
    return attend_checked(
        checked,
        options,
        out=out,
        return_lse=check_flag("return_lse", return_lse),
        scale=scale,
        num_threads=threads_of(num_threads),
        progress=progress,
    )
