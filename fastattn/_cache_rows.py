"""What both caches are made of: rows of keys and values in the cache's dtype, int8 with a scale for each row."""

from __future__ import annotations

import math
import operator
from typing import Any, cast

import numpy as np

from fastattn._arrays import (
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT8,
    Array,
    as_array,
    as_floats,
    as_integers,
    float_kind,
    is_half,
)
from fastattn._attention import attention
from fastattn._quantized import quantize_rows, quantized_attention
from fastattn._typing import AttentionOptions

# Keys, or values: one array (..., K, rows, features), and for int8 codes a second one (..., K, rows) of float32 scales.
# An index that ends in the axis of rows means the same rows in each.
Parts = tuple[Array, ...]

NUMBERS = 2**60  # of 8 bytes, more than an address can reach

# Options of `attention` that the cache itself answers.
OWN_OPTIONS = ("kv_lens", "block_table")


def check_size(name: str, value: Any, least: int) -> int:
    """One integer of at least `least`."""
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if size < least:
        raise ValueError(f"{name} must be at least {least}, got {size}")
    return size


def check_cache_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype of a cache's rows."""
    rule = "dtype must be float32, float64, float16, bfloat16 (of ml_dtypes) or int8, in native byte order"
    if dtype is None:  # which NumPy takes for float64
        raise TypeError(f"{rule}, got None")
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{rule}, got {dtype!r}") from None
    if all(found != kind for kind in (FLOAT32, FLOAT64, FLOAT16, INT8)) and float_kind(found) != "bfloat16":
        raise TypeError(f"{rule}, got {found if found.isnative else found.str}")
    return found


class CacheRows:
    """Room for keys and values (outer, K, rows, features), and what can be asked about it."""

    SIZES: tuple[str, str]  # names of outer and rows

    def __init__(self, outer: int, num_kv_heads: Any, rows: int, head_dim: Any, value_dim: Any, dtype: Any) -> None:
        self._num_kv_heads = check_size("num_kv_heads", num_kv_heads, 1)
        self._head_dim = check_size("head_dim", head_dim, 1)
        self._value_dim = self._head_dim if value_dim is None else check_size("value_dim", value_dim, 1)
        self._dtype = check_cache_dtype(dtype)
        for features, name in ((self._head_dim, "head_dim"), (self._value_dim, "value_dim")):
            sizes = (outer, self._num_kv_heads, rows, features)
            if math.prod(max(size, 1) for size in sizes) >= NUMBERS:
                names = f"{self.SIZES[0]}, num_kv_heads, {self.SIZES[1]} and {name}"
                raise ValueError(f"{names} must make fewer than 2**60 numbers, got {' x '.join(map(str, sizes))}")
        # Zeros: the system provides the memory as rows are written.
        shape = (outer, self._num_kv_heads, rows)
        self._keys, self._values = (
            (np.zeros((*shape, features), self._dtype), *((np.zeros(shape, FLOAT32),) if self._dtype == INT8 else ()))
            for features in (self._head_dim, self._value_dim)
        )

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads, K."""
        return self._num_kv_heads

    @property
    def head_dim(self) -> int:
        """Features of a key, D."""
        return self._head_dim

    @property
    def value_dim(self) -> int:
        """Features of a value, E."""
        return self._value_dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored rows."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the room for keys and values and, for int8, their scales."""
        return sum(part.nbytes for part in self._keys + self._values)

    @property
    def keys(self) -> Array:
        """Keys as they are stored, codes for int8: a view."""
        return self._readable(self._keys)[0]

    @property
    def values(self) -> Array:
        """Values as they are stored, codes for int8: a view of keys' shape but for the features."""
        return self._readable(self._values)[0]

    @property
    def key_scales(self) -> Array | None:
        """For int8, the float32 factor of each row of `keys`: a view. None for other dtypes."""
        return self._readable(self._keys)[1] if self._dtype == INT8 else None

    @property
    def value_scales(self) -> Array | None:
        """For int8, the float32 factor of each row of `values`: a view. None for other dtypes."""
        return self._readable(self._values)[1] if self._dtype == INT8 else None

    def _readable(self, parts: Parts) -> Parts:
        """The part that users see, as views."""
        raise NotImplementedError

    def _row_text(self) -> str:
        return f"{self._num_kv_heads} heads, {self._head_dim} and {self._value_dim} features in {self._dtype}"

    def _check_rows(self, k: Any, v: Any, lead: tuple[int, ...]) -> tuple[Array, Array]:
        """k (*lead, K, n, D) and v (*lead, K, n, E), as floats that rows of the cache can be made of."""
        k, v = self._as_rows("k", k), self._as_rows("v", v)
        for name, array, features in (("k", k, self._head_dim), ("v", v, self._value_dim)):
            front = (*lead, self._num_kv_heads)
            if array.ndim != len(lead) + 3 or (*array.shape[:-2], array.shape[-1]) != (*front, features):
                wanted = ", ".join(map(str, (*front, "n", features)))
                raise ValueError(f"{name} must have shape ({wanted}), got {array.shape}")
        if k.dtype != v.dtype:
            raise TypeError(f"k and v must have the same dtype, got {k.dtype} and {v.dtype}")
        if k.shape[-2] != v.shape[-2]:
            raise ValueError(f"v must have as many rows as k, {k.shape[-2]}, got {v.shape[-2]}")
        return k, v

    def _as_rows(self, name: str, value: Any) -> Array:
        """Floats of the cache's dtype, or of one that storing rounds: float32 for half types, all three for int8."""
        array = as_array(name, value)
        dtype, kind = self._dtype, float_kind(array.dtype)
        if array.dtype == INT8:
            raise TypeError(f"{name} must be floats, which an int8 cache quantizes itself, got int8")
        if dtype == INT8:
            allowed, fits = "float32, float16 or bfloat16", kind not in (None, "float64")
        elif is_half(dtype):
            allowed, fits = f"{dtype} or float32", array.dtype in (dtype, FLOAT32)
        else:
            allowed, fits = str(dtype), array.dtype == dtype or (dtype == FLOAT64 and array.dtype.kind in "biu")
        if not fits:
            raise TypeError(f"{name} must be {allowed} for a cache of {dtype}, got {array.dtype}")
        return as_floats(name, array)

    def _encoded(self, k: Array, v: Array) -> Parts:
        """What `_store` takes, for rows of k and v. This may fail, so it comes before any change."""
        new = self._encode("k", k) + self._encode("v", v)
        if any(np.may_share_memory(rows, part) for rows in new for part in self._keys + self._values):
            return tuple(rows.copy() for rows in new)  # the caller hands in views of this cache
        return new

    def _store(self, target: tuple[Any, ...], new: Parts) -> None:
        """Write encoded rows at an index of outer, heads and rows."""
        for part, rows in zip(self._keys + self._values, new, strict=True):
            part[target] = rows

    def _encode(self, name: str, rows: Array) -> Parts:
        """Rows as they are stored: rounded to nearest even, to infinity beyond the range of a half type."""
        if self._dtype == INT8:
            finite = np.isfinite(rows)
            if not finite.all():
                raise ValueError(f"{name} must be finite to be quantized, got {rows[~finite][0]}")
            return quantize_rows(rows)
        with np.errstate(all="ignore"):
            return (rows.astype(self._dtype, copy=False),)

    def _attend(
        self, q: Any, lead: tuple[int, ...], options: dict[str, Any], **own: Any
    ) -> Array | tuple[Array, Array]:
        """`attention`, or its quantized kin, of q (*lead, H, N, D) with rows as they are stored."""
        for name in OWN_OPTIONS:
            if name in options:
                raise TypeError(f"{name} must be left out, because the cache gives its own, got {options[name]!r}")
        q = as_array("q", q)
        shape = q.shape
        if len(shape) != len(lead) + 3 or shape[:-3] != lead:
            wanted = ", ".join(map(str, (*lead, "H", "N", self._head_dim)))
            raise ValueError(f"q must have shape ({wanted}), got {shape}")
        keys, values = self._readable(self._keys), self._readable(self._values)
        return_lse: bool = options.pop("return_lse", False)
        given = cast(AttentionOptions, own | options)
        if len(keys) == 1:
            return attention(q, keys[0], values[0], return_lse=return_lse, **given)
        return quantized_attention(q, keys[0], keys[1], values[0], values[1], return_lse=return_lse, **given)


def check_counts(lengths: Any, n_rows: int, lead: tuple[int, ...]) -> Array:
    """How many of n_rows count, for each entry of the leading shape, flat."""
    counts = as_integers("lengths", n_rows if lengths is None else lengths, lead).reshape(-1)
    wrong = (counts < 0) | (counts > n_rows)
    if wrong.any():
        raise ValueError(f"lengths must lie in 0 ... {n_rows}, the rows given, got {counts[wrong][0]}")
    return counts


def rows_that_count(counts: Array, n_rows: int) -> tuple[Array, Array]:
    """Entry and row of each row that counts."""
    counted: Array = np.arange(n_rows) < counts[:, None]
    entry, row = np.nonzero(counted)
    return entry, row
