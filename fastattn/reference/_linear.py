"""Attention without a softmax."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from fastattn._typing import Real

from ._attention import Array, repeat_heads, weighted_sum


def linear_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, causal: bool = False, scale: Real = 1.0, dtype: DTypeLike = np.float64
) -> Array:
    """Compute ``scale * (q kᵀ) v``: attention without a softmax.

    Parameters
    ----------
    q, k, v : array_like
        (..., H, N, D), (..., K, S, D) and (..., K, S, E); leading axes broadcast and K divides H. 2-D is one head.
    causal : bool, default False
        Query i sees key j only if ``j <= i + S - N``.
    scale : float, default 1
    dtype
        As for `attention`.

    Returns
    -------
    ndarray (..., H, N, E)

    Raises
    ------
    ValueError
        For shapes that do not fit together.

    References
    ----------
    Katharopoulos et al., "Transformers are RNNs", 2020, with the identity as feature map and no denominator.

    Examples
    --------
    >>> from fastattn import reference
    >>> print(reference.linear_attention([[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]], causal=True))
    [[15.]
     [78.]]
    """
    q, k, v = (np.asarray(array).astype(dtype) for array in (q, k, v))
    one_head = q.ndim == k.ndim == v.ndim == 2
    q, k, v = (array[None] if array.ndim == 2 else array for array in (q, k, v))
    k, v = (repeat_heads(array, q.shape[-3]) for array in (k, v))
    n_queries, n_keys = int(q.shape[-2]), int(k.shape[-2])
    visible = np.tri(n_queries, n_keys, n_keys - n_queries, bool) if causal else np.ones((n_queries, n_keys), bool)
    number: Any = np.dtype(dtype).type
    with np.errstate(all="ignore"):
        scores: Array = q @ k.swapaxes(-1, -2) * number(scale)
        weights: Array = np.where(visible, scores, scores.dtype.type(0))
        out = weighted_sum(weights, visible, v)
    return out[0] if one_head else out


def mhsa_forward(x: ArrayLike, w_qkv: ArrayLike, *, dtype: DTypeLike = np.float64) -> Array:
    """Compute ``x + (q kᵀ) v`` with ``[q, k, v] = x @ w_qkv``: one head, no scale, no softmax.

    Parameters
    ----------
    x : array_like (..., N, D)
    w_qkv : array_like (D, 3 * D)
    dtype
        As for `attention`.

    Returns
    -------
    ndarray (..., N, D)

    Raises
    ------
    ValueError
        For shapes that do not fit together.

    Examples
    --------
    >>> from fastattn import reference
    >>> print(reference.mhsa_forward([[1.0], [2.0]], [[1.0, 2.0, 3.0]]))
    [[31.]
     [62.]]
    """
    x, w_qkv = np.asarray(x).astype(dtype), np.asarray(w_qkv).astype(dtype)
    with np.errstate(all="ignore"):
        q, k, v = np.split(x @ w_qkv, 3, axis=-1)
        return np.asarray(x + (q @ k.swapaxes(-1, -2)) @ v)
