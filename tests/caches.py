"""What the tests of the caches share: the dtypes they store, what they store, their bytes."""

import copy

import ml_dtypes
import numpy as np
from inputs import normal

from fastattn._quantized import quantize_rows

# What a cache stores, and what its queries and appended rows are.
DTYPES = {
    "float32": (np.float32, np.float32),
    "float64": (np.float64, np.float64),
    "float16": (np.float16, np.float16),
    "float16 from float32": (np.float16, np.float32),
    "bfloat16": (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    "bfloat16 from float32": (ml_dtypes.bfloat16, np.float32),
    "int8": (np.int8, np.float32),
}

SEPARATE = ("_keys", "_values", "_pool")


def readable(rows, dtype):
    """Rows as a cache of dtype gives them back: rounded once, int8 as codes times scales."""
    if dtype != np.int8:
        return rows.astype(dtype)
    codes, scales = quantize_rows(rows)
    return codes * scales[..., None]


def contents(cache, of_keys=True):
    """All keys or values that a cache shows, as numbers."""
    data, scales = (cache.keys, cache.key_scales) if of_keys else (cache.values, cache.value_scales)
    return data if scales is None else data * scales[..., None]


def state(cache):
    """Everything a cache is: the bytes of its arrays and the rest of it."""
    parts = [part.tobytes() for part in cache._keys + cache._values]
    rest = vars(cache) | vars(vars(cache).get("_pool", cache))
    return parts, copy.deepcopy({name: _listed(x) for name, x in rest.items() if name not in SEPARATE})


def _listed(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


def rows_for(lead, heads, n, dim, value_dim, dtype, seed):
    """k (*lead, heads, n, dim) and v (*lead, heads, n, value_dim)."""
    return (
        normal(*lead, heads, n, dim, dtype=dtype, seed=2 * seed),
        normal(*lead, heads, n, value_dim, dtype=dtype, seed=2 * seed + 1),
    )


def padded(arrays, n_rows):
    """Arrays (heads, own rows, features) side by side, filled up with zeros: (len(arrays), heads, n_rows, features)."""
    heads, _, features = arrays[0].shape
    whole = np.zeros((len(arrays), heads, n_rows, features), arrays[0].dtype)
    for target, array in zip(whole, arrays, strict=True):
        target[:, : array.shape[1]] = array
    return whole
