"""PyTorch's spelling of attention, for NumPy arrays."""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastattn._arrays import Array, as_floats
from fastattn._attention import attention
from fastattn._options import check_flag, check_real
from fastattn._typing import DoubleArray, Numbers, Real, SmallFloat


@overload
def scaled_dot_product_attention(  # type: ignore[overload-overlap]
    query: NDArray[SmallFloat],
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    dropout_p: Real = ...,
    is_causal: bool = ...,
    *,
    scale: Real | None = ...,
    enable_gqa: bool = ...,
) -> NDArray[SmallFloat]: ...
@overload
def scaled_dot_product_attention(
    query: DoubleArray | Numbers,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    dropout_p: Real = ...,
    is_causal: bool = ...,
    *,
    scale: Real | None = ...,
    enable_gqa: bool = ...,
) -> NDArray[np.float64]: ...
@overload
def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = ...,
    dropout_p: Real = ...,
    is_causal: bool = ...,
    *,
    scale: Real | None = ...,
    enable_gqa: bool = ...,
) -> Array: ...


def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: Real = 0.0,
    is_causal: bool = False,
    *,
    scale: Real | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Attention with the signature and meaning of ``torch.nn.functional.scaled_dot_product_attention``.

    Parameters
    ----------
    query : array_like, shape (..., H, N, D)
    key : array_like, shape (..., K, S, D)
    value : array_like, shape (..., K, S, E)
        dtypes as for `attention`.
    attn_mask : array_like, broadcastable to (..., H, N, S), optional
        bool: True where a query may attend. Float: added to the scores.
    dropout_p : float, default 0.0
        Must be 0: this is inference.
    is_causal : bool, default False
        Query i sees key j iff ``j <= i``, aligned at the start (unlike `attention`, which aligns at the end). Not
        together with attn_mask.
    scale : float, optional
        Default ``1 / sqrt(D)``.
    enable_gqa : bool, default False
        Allow K to be a divisor of H; K = 1 broadcasts without it.

    Returns
    -------
    ndarray, shape (..., H, N, E)

    Raises
    ------
    TypeError, ValueError
        As `attention`; also for dropout, a mask beside is_causal, and K != H without enable_gqa.

    Examples
    --------
    >>> import numpy as np, fastattn
    >>> x = np.eye(2)[None, None]
    >>> fastattn.scaled_dot_product_attention(x, x, x, is_causal=True)[0, 0, 0]
    array([1., 0.])
    """
    if check_real("dropout_p", dropout_p) != 0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}")
    causal = check_flag("is_causal", is_causal)
    if causal and attn_mask is not None:
        raise ValueError("attn_mask must be None when is_causal is True, got both")
    q, k, v = as_floats("query", query), as_floats("key", key), as_floats("value", value)
    if not check_flag("enable_gqa", enable_gqa):
        n_heads, kv_heads = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k))
        if n_heads != kv_heads and kv_heads != 1:
            raise ValueError(f"key must have {n_heads} heads, as query has, or enable_gqa=True, got {kv_heads} heads")
    offset = 0 if causal else None
    return np.asarray(attention(q, k, v, mask=attn_mask, causal=causal, q_offset=offset, scale=scale))
