"""How close a result must be to the oracle, in one place.

The bound is relative to plain NumPy: the largest error may be twice that of the same formula evaluated with NumPy in
the accumulation type, plus ``4 * eps * max|v|``. A half-precision result may be off by one unit in the last place of
``max|v|`` instead. NaN and infinities must stand exactly where they belong, and rows that see no key are exactly 0.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fastattn import reference
from fastattn.reference._attention import attend

HALF_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_HAS_WIDE_ORACLE = np.finfo(np.longdouble).eps < np.finfo(np.float64).eps


class _Expectation(NamedTuple):
    out: np.ndarray  # the oracle's, in at least float64
    lse: np.ndarray
    plain_out: np.ndarray  # NumPy's, in the accumulation type
    plain_lse: np.ndarray
    empty: np.ndarray  # bool, of the shape of lse: rows that see no key
    largest_value: float  # the largest finite |v| that any row sees
    n_keys: int


def result_dtype(array: Any) -> np.dtype:
    """Return the dtype of the output for queries `array`: their own, or float64 for integers and lists."""
    dtype = np.asarray(array).dtype
    return np.dtype(np.float64) if dtype.kind in "biu" else dtype


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type that scores, weights and sums are kept in for queries of `dtype`."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def ulp(value: float, dtype: np.dtype) -> float:
    """Return the distance from |value| to the next larger number of `dtype`."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.frexp(abs(value))[1] - 1 if value else info.minexp
    return float(np.ldexp(1.0, max(int(exponent), int(info.minexp)) - int(info.nmant)))


def assert_attention_close(actual: Any, q: Any, k: Any, v: Any, /, *, expected: Any = None, **options: Any) -> None:
    """Assert that `actual` is what ``fastattn.attention(q, k, v, **options)`` must return.

    Parameters
    ----------
    actual : ndarray, or (ndarray, ndarray) with ``return_lse=True``
    q, k, v
        The arguments of the call, positional.
    expected : like `actual`, optional
        Known values to compare with instead of the oracle's.
    **options
        The keyword arguments of the call; ``out``, ``num_threads`` and ``progress`` are ignored.
    """
    return_lse = options.pop("return_lse", False)
    options = {name: value for name, value in options.items() if name not in ("out", "num_threads", "progress")}
    dtype = result_dtype(q)
    if return_lse:
        assert isinstance(actual, tuple), f"expected (out, lse), got {type(actual).__name__}"
        assert len(actual) == 2, f"expected (out, lse), got {len(actual)} results"
        actual_out, actual_lse = actual
        known_out, known_lse = (None, None) if expected is None else expected
    else:
        actual_out, known_out = actual, expected
    expectation = _expect(q, k, v, options, accumulation_dtype(dtype))

    assert_no_worse_than_plain(
        actual_out,
        expectation.out,
        expectation.plain_out,
        known=known_out,
        dtype=dtype,
        largest_value=expectation.largest_value,
        n_terms=expectation.n_keys,
    )
    assert not np.any(np.asarray(actual_out)[expectation.empty]), "a row that sees no key is not 0"
    if return_lse:
        finite = np.isfinite(expectation.lse)
        assert_no_worse_than_plain(
            actual_lse,
            expectation.lse,
            expectation.plain_lse,
            known=known_lse,
            dtype=accumulation_dtype(dtype),
            largest_value=np.abs(expectation.lse, where=finite, out=np.ones(finite.shape)).max(initial=1.0),
            name="lse",
        )


def assert_no_worse_than_plain(
    actual: Any,
    oracle: Any,
    plain: Any,
    *,
    known: Any = None,
    dtype: Any,
    largest_value: float,
    n_terms: int = 1,
    name: str = "out",
) -> None:
    """Assert the type, the shape, the non-finite entries and the error of any result that sums weighted values.

    Parameters
    ----------
    actual : ndarray
        The result to judge.
    oracle, plain : array_like
        The oracle's values, and plain NumPy's in the accumulation type.
    known : array_like, optional
        What to judge by instead of the oracle's values. The error of plain NumPy is the one against the oracle still,
        so that wrong known values cannot widen their own bound.
    dtype : dtype
        What `actual` must have.
    largest_value : float
        The scale of the absolute part of the bound: the largest finite magnitude that is summed.
    n_terms : int
        The length of the sums; where ``n_terms * largest_value`` overflows, an infinity of the right sign will do.
    name : str
        What to call `actual` in the message.
    """
    dtype = np.dtype(dtype)
    assert isinstance(actual, np.ndarray), f"{name}: expected an ndarray, got {type(actual).__name__}"
    assert actual.dtype == dtype, f"{name}: expected dtype {dtype}, got {actual.dtype}"
    oracle, plain = np.asarray(oracle), np.asarray(plain)
    expected = oracle if known is None else np.asarray(known)
    assert actual.shape == expected.shape, f"{name}: expected shape {expected.shape}, got {actual.shape}"
    accumulation = np.finfo(accumulation_dtype(dtype))
    actual, expected = (array.astype(np.promote_types(oracle.dtype, np.float64)) for array in (actual, expected))

    right_kind = _kind(actual) == _kind(expected)
    if known is None:
        # Beyond the range of the accumulation type plain NumPy's arithmetic is right as well as the oracle's.
        right_kind |= (_kind(actual) == _kind(plain)) & ~np.isfinite(plain)
    if n_terms * float(largest_value) > float(accumulation.max):
        right_kind |= np.isinf(actual) & (np.sign(actual) == np.sign(expected))
    assert right_kind.all(), _report(name, "NaN or infinity in the wrong place", ~right_kind, actual, expected)

    error = _finite_error(actual, expected)
    if dtype in HALF_DTYPES:
        allowed = ulp(float(largest_value), dtype)
    else:
        plain_error = float(_finite_error(plain, oracle).max(initial=0))
        allowed = 2 * plain_error + 4 * float(accumulation.eps) * float(largest_value)
    too_far = error > allowed
    assert not too_far.any(), _report(name, f"error above {allowed:.3g}", too_far, actual, expected)


def assert_linear_close(actual: Any, function: str, *arrays: Any, dtype: Any = None, **options: Any) -> None:
    """Compare `actual` with ``reference.<function>(*arrays, **options)`` and with plain NumPy's error."""
    dtype = result_dtype(arrays[0]) if dtype is None else np.dtype(dtype)
    accumulation = accumulation_dtype(dtype)
    oracle = getattr(reference, function)
    wide = np.longdouble if accumulation == np.float64 else np.float64
    # The sum of the magnitudes of all terms is the scale of the rounding error, in whichever order they are added.
    finite = [np.nan_to_num(np.abs(np.asarray(array).astype(wide)), posinf=0) for array in arrays]
    scale = {"scale": abs(options["scale"])} if "scale" in options else {}
    assert_no_worse_than_plain(
        actual,
        oracle(*arrays, dtype=wide, **options),
        oracle(*arrays, dtype=accumulation, **options),
        dtype=dtype,
        largest_value=float(oracle(*finite, dtype=wide, **{**options, **scale}).max(initial=0)),
    )
    assert actual.flags.c_contiguous


def _expect(q: Any, k: Any, v: Any, options: dict[str, Any], dtype: np.dtype) -> _Expectation:
    """Evaluate the oracle, and plain NumPy in the accumulation type `dtype`."""
    # Float64 results need an oracle that is better than NumPy's float64, or NumPy would look free of error.
    oracle = attend(q, k, v, dtype=np.longdouble if dtype == np.float64 else np.float64, **options)
    if dtype == np.float64 and not _HAS_WIDE_ORACLE:
        # Without a wider type, the change from adding everything up in the other order stands for that error.
        q, k = (np.asarray(array)[..., ::-1] for array in (q, k))
    plain_out, plain_lse = reference.attention(q, k, v, dtype=dtype, return_lse=True, **options)
    seen = oracle.visible.any(axis=-2)[..., None] & np.isfinite(oracle.values)  # (..., H, S, E)
    return _Expectation(
        out=oracle.out,
        lse=oracle.lse,
        plain_out=plain_out,
        plain_lse=plain_lse,
        empty=~oracle.visible.any(axis=-1).reshape(oracle.lse.shape),
        largest_value=float(np.where(seen, np.abs(oracle.values), 0).max(initial=0)),
        n_keys=oracle.visible.shape[-1],
    )


def _finite_error(array: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return |array - true| where both are finite, and 0 elsewhere."""
    both = np.isfinite(array) & np.isfinite(true)
    return np.where(both, np.abs(np.where(both, array, 0) - np.where(both, true, 0)), 0)


def _kind(array: np.ndarray) -> np.ndarray:
    """Return 0 for a finite number, 1 and -1 for the infinities, 2 for NaN."""
    return np.where(np.isnan(array), 2, np.where(np.isinf(array), np.sign(np.nan_to_num(array)), 0))


def _report(name: str, problem: str, bad: np.ndarray, actual: np.ndarray, expected: np.ndarray) -> str:
    """Describe the first wrong entry."""
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return (
        f"{name}: {problem} in {int(bad.sum())} of {bad.size} entries, "
        f"first at {index}: {actual[index]!s}, expected {expected[index]!s}"
    )
