"""The options of `attention`, checked and in the form that the kernels read."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from fastattn._arrays import KINDS, Array, as_array, as_integers, bits_view, float_kind, int64_array
from fastattn._typing import Real, Report, Window

UNBOUNDED = 1 << 61
FARTHEST = 1 << 59


@dataclass(slots=True)
class Options:
    """What the kernels read. Arrays over entries are flat or have one leading axis."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    softcap: float = 0.0
    lengths: Array | None = None
    offsets: Array | None = None
    query_bounds: Array | None = None
    key_bounds: Array | None = None
    longest_queries: int = 0
    longest_keys: int = 0
    pages: Array | None = None
    slopes: Array | None = None
    sinks: Array | None = None
    mask: Array | None = None
    mask_kind: int = 0
    bias: Array | None = None
    bias_kind: int = 0
    computing_kind: int = 0
    scales: tuple[Array, Array] | None = None
    progress: Report | None = None


@dataclass(slots=True)
class Sizes:
    """The sizes of one call: leading axes, query heads, queries, keys."""

    lead: tuple[int, ...]
    n_heads: int
    n_queries: int
    n_keys: int


def check_flag(name: str, value: bool) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_real(name: str, value: Real) -> float:
    """One finite real number as a Python float: int, float, NumPy scalar or 0-d array."""
    array = as_array(name, value)
    if array.ndim or (array.dtype.kind not in "iuf" and float_kind(array.dtype) is None):
        raise TypeError(f"{name} must be one real number, got {value!r}")
    number = float(array)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def check_scale(scale: Real | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    return check_real("scale", scale)


# A smaller cap makes all scores as good as equal, as this one does, but could round to 0 in float32.
_SMALLEST_SOFTCAP = 1e-37


def check_softcap(softcap: Real | None) -> float:
    if softcap is None:
        return 0.0
    number = check_real("softcap", softcap)
    if number < 0:
        raise ValueError(f"softcap must be 0 or positive, got {number}")
    return max(number, _SMALLEST_SOFTCAP) if number else 0.0


def _window_side(name: str, value: SupportsIndex | None) -> int:
    if value is None:
        return UNBOUNDED
    try:
        side = operator.index(value)
    except TypeError:
        raise TypeError(f"window's {name} side must be an integer or None, got {value!r}") from None
    if side < -1:
        raise ValueError(f"window's {name} side must be at least 0, or -1 or None for unbounded, got {side}")
    return UNBOUNDED if side == -1 or side >= FARTHEST else side


def check_window(window: Window | None, causal: bool) -> tuple[int, int]:
    """Keys to the left and to the right of the diagonal; causal bounds the right side by 0."""
    left, right = UNBOUNDED, UNBOUNDED
    if window is not None:
        if not isinstance(window, (tuple, list)):
            raise TypeError(f"window must be a pair (left, right), got {window!r}")
        if len(window) != 2:
            raise ValueError(f"window must be a pair (left, right), got {len(window)} values")
        left, right = _window_side("left", window[0]), _window_side("right", window[1])
    return left, 0 if causal else right


def check_lengths(kv_lens: Any, sizes: Sizes) -> Array:
    lengths = as_integers("kv_lens", kv_lens, sizes.lead).reshape(-1)
    if np.maximum.reduce(lengths.view(np.uint64), initial=0) > sizes.n_keys:  # where negative ones are large
        wrong = lengths[(lengths < 0) | (lengths > sizes.n_keys)][0]
        raise ValueError(f"kv_lens must lie in 0 ... {sizes.n_keys}, the number of keys, got {wrong}")
    return lengths


def check_offsets(q_offset: Any, sizes: Sizes) -> Array:
    """Positions beyond any array are brought near enough that sums with them fit 64 bits."""
    return np.clip(as_integers("q_offset", q_offset, sizes.lead).reshape(-1), -2 * FARTHEST, 2 * FARTHEST)


def check_per_head(name: str, value: Any, sizes: Sizes, per_entry: bool) -> Array:
    """One real number per query head, (H,), or with per_entry also (..., H), as float64."""
    array = as_array(name, value)
    if array.dtype.kind not in "iuf" and float_kind(array.dtype) is None:
        raise TypeError(f"{name} must be real numbers, got {array.dtype}")
    allowed = [(sizes.n_heads,), (*sizes.lead, sizes.n_heads)] if per_entry else [(sizes.n_heads,)]
    if array.shape not in allowed:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, dict.fromkeys(allowed)))}, got {array.shape}")
    return _at_most_float64(array).astype(np.float64)


def check_slopes(alibi_slopes: Any, sizes: Sizes) -> Array:
    slopes = check_per_head("alibi_slopes", alibi_slopes, sizes, per_entry=True)
    if not np.isfinite(slopes).all():
        raise ValueError(f"alibi_slopes must be finite, got {slopes[~np.isfinite(slopes)][0]}")
    return np.ascontiguousarray(np.broadcast_to(slopes, (*sizes.lead, sizes.n_heads))).reshape(-1)


def _at_most_float64(array: Array) -> Array:
    """A wider float type as float64, where what is finite stays finite; others as they are."""
    if array.dtype.kind != "f" or array.dtype.itemsize <= 8:
        return array
    largest = np.finfo(np.float64).max
    finite = np.clip(array, -largest, largest)
    return np.where(np.isinf(array), array, finite).astype(np.float64)


def check_bias(name: str, value: Any, sizes: Sizes) -> tuple[Array, int]:
    """A mask or bias as a view of shape (..., H, N, S), and its element kind."""
    array = _at_most_float64(as_array(name, value))
    kind = float_kind(array.dtype)
    if array.dtype == np.bool_ and name == "mask":
        kind = "bool"
    if kind is None:
        rule = "bool (True: may attend) or float (added)" if name == "mask" else "float (added)"
        raise TypeError(f"{name} must be {rule}: use bool for keep/drop, float to add; got {array.dtype}")
    full = (*sizes.lead, sizes.n_heads, sizes.n_queries, sizes.n_keys)
    try:
        view = np.broadcast_to(array, full)
    except ValueError:
        raise ValueError(f"{name} must broadcast to (..., H, N, S) = {full}, got shape {array.shape}") from None
    return bits_view(view), KINDS[kind]


def check_pages(block_table: Any, lead: tuple[int, ...]) -> Array:
    """block_table (..., max_pages) as contiguous int64 (entries, max_pages); check_pages_used checks the numbers."""
    array = int64_array("block_table", block_table)
    if array.ndim != len(lead) + 1 or array.shape[:-1] != lead:
        wanted = ", ".join([*map(str, lead), "max_pages"])
        raise ValueError(f"block_table must have shape ({wanted}), got {array.shape}")
    return array.reshape(math.prod(lead), array.shape[-1])


def check_pages_used(pages: NDArray[np.int64], lengths: NDArray[np.int64], page_size: int, n_pages: int) -> None:
    """Every page that holds a valid key must exist."""
    outside = pages.view(np.uint64) >= n_pages  # where negative ones are large
    if not outside.any():
        return
    wrong = outside & (np.arange(int(pages.shape[1])) * page_size < lengths[:, None])
    if wrong.any():
        raise ValueError(f"block_table must hold page numbers 0 ... {n_pages - 1}, got {pages[wrong][0]}")
