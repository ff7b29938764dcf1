"""Array arguments: kinds, dtypes, shapes, overlap. Nothing here copies an array that need not be copied."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
FLOAT16 = np.dtype(np.float16)
INT8 = np.dtype(np.int8)

# Element kinds as the kernels number them.
KINDS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "bool": 4}

_FLOATS = {2: "float16", 4: "float32", 8: "float64"}


def float_kind(dtype: np.dtype[Any]) -> str | None:
    """``"float32"``, ``"float64"``, ``"float16"``, ``"bfloat16"`` or None. bfloat16 (of ml_dtypes) is known by its
    name, so that nothing has to be imported."""
    if dtype.kind == "f":
        return _FLOATS.get(dtype.itemsize)
    if dtype.name == "bfloat16" and dtype.itemsize == 2:
        return "bfloat16"
    return None


def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What sums are kept in: float64 for float64 and float32 for everything smaller. That of log-sum-exps, too."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def is_half(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize == 2


def as_array(name: str, value: Any) -> Array:
    """The argument as a plain array, native byte order, unconverted otherwise."""
    if type(value) is np.ndarray and value.dtype.isnative:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array, because its mask would be ignored: pass mask= instead")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} must be a rectangular array of numbers: {error}") from None
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def as_floats(name: str, value: Any) -> Array:
    """q, k or v: integers, bools and lists become float64; other than the four floating types is refused."""
    array = as_array(name, value)
    if array.dtype.kind in "biu":
        return array.astype(FLOAT64)
    if float_kind(array.dtype) is None:
        raise TypeError(
            f"{name} must be float32, float64, float16, bfloat16 or integers (taken as float64), got {array.dtype}"
        )
    return array


def int64_array(name: str, value: Any) -> Array:
    """A contiguous int64 array, a copy, from integers of any shape; an empty list counts as integers."""
    array = as_array(name, value)
    if array.dtype.kind not in "iu" and not (array.size == 0 and array.dtype.kind == "f"):
        # NumPy makes floats or objects of lists of integers beyond 64 bits.
        numbers = [] if isinstance(value, np.ndarray) else np.asarray(value, object).ravel().tolist()
        if not numbers or not all(type(number) is int for number in numbers):
            raise TypeError(f"{name} must be integers, got {array.dtype}")
        raise ValueError(f"{name} must fit 64-bit signed integers, got {max(numbers, key=abs)}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must fit 64-bit signed integers, got {array.max()}")
    return array.astype(np.int64, order="C")


def as_integers(name: str, value: Any, shape: tuple[int, ...]) -> Array:
    """A contiguous int64 array of the given shape, a copy, from one integer or an integer array of that shape."""
    array = int64_array(name, value)
    if array.ndim and array.shape != shape:
        raise ValueError(f"{name} must be one integer or have shape {shape}, got {array.shape}")
    return array if array.shape == shape else np.full(shape, array, np.int64)


def bits_view(array: Array) -> Array:
    """Half types as their 16 bits (bfloat16 arrays have no buffer format); others as they are."""
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


def overlaps_itself(array: Array) -> bool:
    """Whether two elements may share memory, by nesting the axes from the smallest stride up."""
    if array.size == 0:
        return False
    span = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < span:
            return True
        span = stride * (length - 1) + span
    return False


def check_out(out: Array, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: dict[str, Array | None]) -> Array:
    """The caller's array for the result, if it can take it."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}")
    if out.dtype != dtype or not out.dtype.isnative:
        came = out.dtype.str if out.dtype.kind != "V" else out.dtype
        raise TypeError(f"out must have dtype {dtype} (q's), got {came}")
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    if not out.flags.writeable:
        raise ValueError("out must be writable, got a read-only array")
    if overlaps_itself(out):
        raise ValueError(f"out must not overlap itself, got strides {out.strides} for shape {out.shape}")
    for name, array in inputs.items():
        if array is not None and _share_memory(out, array):
            raise ValueError(f"out must not overlap an input, got memory that {name} uses")
    return out


def _share_memory(a: Array, b: Array) -> bool:
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return True


def leading_collapses(array: Array, n_core: int) -> bool:
    """Whether the axes before the last n_core are one axis in memory, so that reshaping them copies nothing."""
    lead = [(n, s) for n, s in zip(array.shape[:-n_core], array.strides[:-n_core], strict=True) if n != 1]
    return array.size == 0 or all(a[1] == b[1] * b[0] for a, b in itertools.pairwise(lead))
