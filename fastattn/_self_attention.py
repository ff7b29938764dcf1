"""The self-attention layer without softmax: ``X + (Q K^T) V`` with ``[Q, K, V] = X W``. `_linear` has the legend."""

from __future__ import annotations

import math
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastattn._arrays import Array, accumulation_dtype, as_floats
from fastattn._linear import SCRATCH_SIZE, attend_linearly, boxes, entries, product_fits, product_of
from fastattn._progress import check_progress, part_of, reported
from fastattn._typing import DoubleArray, Numbers, Report, SmallFloat


@overload
def mhsa_forward(  # type: ignore[overload-overlap]
    x: NDArray[SmallFloat], w_qkv: NDArray[SmallFloat], *, progress: Report | None = ...
) -> NDArray[SmallFloat]: ...
@overload
def mhsa_forward(
    x: DoubleArray | Numbers, w_qkv: DoubleArray | Numbers, *, progress: Report | None = ...
) -> NDArray[np.float64]: ...
@overload
def mhsa_forward(x: ArrayLike, w_qkv: ArrayLike, *, progress: Report | None = ...) -> Array: ...


def mhsa_forward(x: ArrayLike, w_qkv: ArrayLike, *, progress: Report | None = None) -> Array:
    """Simplified multi-head self-attention, forward pass.

    Computes ``[Q, K, V] = X @ W`` (split into thirds) and returns ``Y = X + (Q K^T) V``: one head, no scale,
    no softmax, no output projection, no normalisation.

    Parameters
    ----------
    x : array_like, shape (..., N, D)
        The rows to transform. Any leading axes.
    w_qkv : array_like, shape (..., D, 3 * D)
        The three projections side by side. Its leading axes broadcast against those of `x`.
    progress : callable, optional
        As for `attention`.

    Returns
    -------
    ndarray, shape (..., N, D)
        A new C-contiguous array of dtype ``numpy.result_type(x, w_qkv)``, lists and integers counting as float64;
        float16 and bfloat16 together give float32. Both are computed in float32 and rounded once.

    Raises
    ------
    TypeError
        If a dtype is not float32, float64, float16, bfloat16 or integers.
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
    # by what they are computed in: numpy.result_type knows a common dtype of the two half types in some versions only
    same = x.dtype == w_qkv.dtype
    dtype = x.dtype if same else np.result_type(accumulation_dtype(x.dtype), accumulation_dtype(w_qkv.dtype))
    lead = _check_self_attention(x, w_qkv)
    report = check_progress(progress)
    n_rows, n_features = x.shape[-2:]
    accumulation = accumulation_dtype(dtype)
    weights = np.ascontiguousarray(w_qkv, dtype=accumulation)
    # numpy.broadcast_to costs as much as the arithmetic of a small problem
    x, weights = (
        array if array.shape[:-2] == lead else np.broadcast_to(array, lead + array.shape[-2:]) for array in (x, weights)
    )
    out = np.empty(x.shape, dtype)
    with np.errstate(all="ignore"):
        cut = boxes(lead, n_rows * n_features, 4 * n_rows * n_features**2)
        for index, box in enumerate(cut):
            part = part_of(report, index, len(cut))
            if n_rows <= n_features:
                _self_attend_by_scores(x[box], weights[box], out[box], part)
            elif not _self_attend_by_state(x[box], weights[box], out[box], part):
                for entry in entries(x[box].shape[:-2]):
                    _self_attend_entry(x[box][entry], weights[box][entry], out[box][entry], part)
    if progress is not None:
        progress(1.0)
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


def _self_attend_by_scores(x: Array, weights: Array, out: Array, report: Report | None) -> None:
    """Write ``X + (Q K^T) V`` for a short sequence: x (..., N, D), weights (..., D, 3D)."""
    rows = np.ascontiguousarray(x, dtype=weights.dtype)
    query, key, value = np.split(product_of(rows, weights, report=part_of(report, 0, 2)), 3, axis=-1)
    result = product_of(product_of(query, key.swapaxes(-1, -2)), value, report=part_of(report, 1, 2))
    np.add(result, rows, out=out, casting="unsafe")


def _self_attend_entry(x: Array, weights: Array, out: Array, report: Report | None) -> None:
    """Write the rows of one entry, by the state if its products stay within the type: x (N, D), weights (D, 3D)."""
    if not _self_attend_by_state(x, weights, out, report):
        rows = np.ascontiguousarray(x, dtype=weights.dtype)
        query, key, value = (part[np.newaxis] for part in np.split(product_of(rows, weights), 3, axis=-1))
        result = np.empty(query.shape, weights.dtype)
        attend_linearly(query, key, value, result, weights.dtype, False, 1.0, report, keep_states=False)
        np.add(result[0], rows, out=out, casting="unsafe")


def _self_attend_by_state(x: Array, weights: Array, out: Array, report: Report | None) -> bool:
    """Write ``X + X (W_Q (K^T V))`` for a long sequence: x (..., N, D), weights (..., D, 3D).

    Returns False, and leaves rows unwritten, where K^T V leaves the range of the type, and where entries that share
    the call need different ways.
    """
    *lead, n_rows, n_features = x.shape
    dtype = weights.dtype
    query_weights, kv_weights = weights[..., :n_features], weights[..., n_features:]
    step = max(SCRATCH_SIZE // max(n_features, 1), n_features, 1)
    scratch = np.empty((*lead, min(step, n_rows), 2 * n_features), dtype)
    first, second = scratch[..., :n_features], scratch[..., n_features:]
    state = np.zeros((*lead, n_features, n_features))
    for start in reported(range(0, n_rows, step), part_of(report, 0, 2)):
        rows = np.ascontiguousarray(x[..., start : start + step, :], dtype=dtype)
        n_chunk = rows.shape[-2]
        product_of(rows, kv_weights, out=scratch[..., :n_chunk, :])
        keys, values = first[..., :n_chunk, :], second[..., :n_chunk, :]
        added = product_of(keys.swapaxes(-1, -2), values)
        if not product_fits(added, keys, values):
            return False
        state += added
    folded = product_of(query_weights, state)
    # Folding must not lose what the two-step product would keep: its intermediate may leave the dtype's
    # range although the result does not. Half of the exponent's range leaves room for the other factor.
    limits = np.finfo(dtype)
    largest = np.abs(folded).max(axis=(-2, -1), initial=0.0)
    fits = (largest > math.sqrt(limits.tiny)) & (largest < math.sqrt(limits.max))
    if fits.size > 1 and not fits.all():
        return False
    factors = [folded.astype(dtype)] if fits.all() else [query_weights, state.astype(dtype)]
    for start in reported(range(0, n_rows, step), part_of(report, 1, 2)):
        rows = result = np.ascontiguousarray(x[..., start : start + step, :], dtype=dtype)
        for factor, buffer in zip(factors, (first, second), strict=False):
            result = product_of(result, factor, out=buffer[..., : rows.shape[-2], :])
        np.add(result, rows, out=out[..., start : start + step, :], casting="unsafe")
    return True
