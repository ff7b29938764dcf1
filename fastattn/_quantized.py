"""int8 keys and values: rows of codes with one scale each, and attention that reads them as they are."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from fastattn._arrays import FLOAT32, FLOAT64, Array, as_array, float_kind
from fastattn._attention import attention
from fastattn._typing import AttentionOptions

LARGEST_CODE = 127
INT8 = np.dtype(np.int8)


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
    steps = largest / LARGEST_CODE
    scales = np.asarray(steps, FLOAT32)
    tiny = (steps != 0) & (scales < np.finfo(FLOAT32).smallest_normal)
    if tiny.any():  # rounded up, or a code would be above 127
        too_small = tiny & (scales * rows.dtype.type(LARGEST_CODE) < largest)
        scales = np.where(too_small, np.nextafter(scales, FLOAT32.type(1)), scales)
    steps = np.where(scales == 0, 1, scales).astype(rows.dtype)
    return np.rint(rows / steps[..., None]).astype(INT8), scales


def dequantize_rows(codes: Array, scales: Array) -> Array:
    """The rows that codes and scales stand for, in float32."""
    return codes * scales[..., None]


def quantized_attention(
    q: ArrayLike,
    k_codes: Array,
    k_scales: Array,
    v_codes: Array,
    v_scales: Array,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Array]:
    """`attention` on quantized keys and values, with float32 q and the same options."""
    keys, values = dequantize_rows(k_codes, k_scales), dequantize_rows(v_codes, v_scales)
    return attention(q, keys, values, return_lse=return_lse, **options)
