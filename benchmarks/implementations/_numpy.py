"""Plain NumPy, the way it is usually written: a product, a softmax, a product."""

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import ITEM_BYTES, Case, Inputs
from benchmarks.implementations._common import SCORES_LIMIT, Call, Unsupported, dense_mask, refuse

NAME = "numpy"
PACKAGE = "numpy"


def prepare(case: Case, inputs: Inputs, threads: int) -> Call:
    """Write out the mask once, outside the timing; the score matrix is part of every call."""
    refuse(case, linear=False, dtypes=("float32", "float64"))
    q, k, v = inputs.q, inputs.k, inputs.v
    if case.linear:
        return Call(lambda: q @ (k.swapaxes(-1, -2) @ v), np.asarray)
    score_bytes = case.batch * case.n_heads * case.n_queries * case.n_keys * ITEM_BYTES[case.dtype]
    if score_bytes > SCORES_LIMIT:
        raise Unsupported(f"needs a score matrix of {score_bytes} bytes")
    mask = dense_mask(case, inputs) if case.masked else None
    return Call(lambda: attention(q, k, v, mask), np.asarray)


def attention(q: NDArray, k: NDArray, v: NDArray, mask: NDArray[np.bool_] | None) -> NDArray:
    """Attention with key/value heads repeated for their query heads and the softmax computed in place."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = (q / np.sqrt(q.shape[-1]).astype(q.dtype)) @ k.swapaxes(-1, -2)
    if mask is not None:
        np.copyto(scores, -np.inf, where=~mask)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ v
