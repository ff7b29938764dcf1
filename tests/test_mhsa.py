"""The layer without softmax, `mhsa_forward`: values, dtypes, pieces, layouts and errors."""

import ml_dtypes
import numpy as np
import pytest
from checker import assert_linear_close
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn import _self_attention, mhsa_forward

BFLOAT16 = ml_dtypes.bfloat16
dtypes = st.sampled_from([np.float32, np.float64, np.float16, BFLOAT16])
few = st.integers(0, 5)


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_mhsa_worked_example():
    x = [[1, 2], [3, 4]]
    w_qkv = [[1, 0, 2, 1, 0, 1], [0, 1, 1, 0, 1, 1]]
    # Q = [[1, 2], [3, 4]], K = [[4, 1], [10, 3]], V = [[2, 3], [4, 7]], Q K^T = [[6, 16], [16, 42]]
    expected = [[1 + 6 * 2 + 16 * 4, 2 + 6 * 3 + 16 * 7], [3 + 16 * 2 + 42 * 4, 4 + 16 * 3 + 42 * 7]]
    actual = mhsa_forward(x, w_qkv)
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.int64])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (2, 2), (3, 2), (2, 3), (9, 4), (40, 3)])
def test_mhsa_of_small_integers_is_exact(n, d, dtype):
    random = np.random.default_rng(n)
    x, w_qkv = random.integers(-3, 4, (n, d)), random.integers(-2, 3, (d, 3 * d))
    q, k, v = np.split(x @ w_qkv, 3, axis=1)
    np.testing.assert_array_equal(mhsa_forward(x.astype(dtype), w_qkv.astype(dtype)), x + q @ k.T @ v)


@settings(deadline=None, max_examples=120)
@given(
    dtype=dtypes, n=st.integers(0, 12), d=few, lead=st.lists(few, max_size=3), missing=st.integers(0, 3),
    kept=st.tuples(*[st.booleans()] * 6), seed=few,
)  # fmt: skip
def test_mhsa_against_oracle(dtype, n, d, lead, missing, kept, seed):
    x_lead = [size if keep else 1 for size, keep in zip(lead, kept[:3], strict=False)]
    w_lead = [size if keep else 1 for size, keep in zip(lead, kept[3:], strict=False)][missing:]
    x, w_qkv = normal(*x_lead, n, d, dtype=dtype, seed=seed), normal(*w_lead, d, 3 * d, dtype=dtype, seed=seed + 1)
    assert_linear_close(mhsa_forward(x, w_qkv), "mhsa_forward", x, w_qkv)


@pytest.mark.parametrize("scratch", [1, 64, 500])
@pytest.mark.parametrize(("x_shape", "w_lead"), [((3, 5, 100, 4), ()), ((5, 6, 7), (3, 1)), ((300, 3), (2,))])
def test_mhsa_cut_into_small_pieces(monkeypatch, scratch, x_shape, w_lead):
    x, w_qkv = normal(*x_shape), normal(*w_lead, x_shape[-1], 3 * x_shape[-1], seed=1)
    monkeypatch.setattr(_self_attention, "SCRATCH_SIZE", scratch)
    assert_linear_close(mhsa_forward(x, w_qkv), "mhsa_forward", x, w_qkv)


@pytest.mark.parametrize(("x_size", "w_size"), [(1e-19, 1e25), (1e19, 1e-25), (1e-30, 1e-10), (0.0, 1.0), (1.0, 0.0)])
def test_mhsa_keeps_the_range_of_the_plain_products(x_size, w_size):
    x, w_qkv = normal(64, 2) * np.float32(x_size), normal(2, 6, seed=1) * np.float32(w_size)
    assert_linear_close(mhsa_forward(x, w_qkv), "mhsa_forward", x, w_qkv)


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "expected"),
    [
        (np.float32, np.float64, np.float64),
        (np.float16, np.float32, np.float32),
        (np.int8, np.float32, np.float64),
        (np.float16, np.int64, np.float64),
        (np.bool_, np.bool_, np.float64),
        (BFLOAT16, np.float32, np.float32),
        (BFLOAT16, np.int8, np.float64),
        (np.float16, BFLOAT16, np.float32),
        (BFLOAT16, np.float16, np.float32),
        (">f4", ">f4", np.float32),
        ("<f8", ">f4", np.float64),
    ],
)
@pytest.mark.parametrize("n", [2, 6])
def test_mhsa_result_dtype(n, x_dtype, w_dtype, expected):
    x, w_qkv = (3 * normal(n, 3)).astype(x_dtype), (3 * normal(3, 9, seed=1)).astype(w_dtype)
    actual = mhsa_forward(x, w_qkv)
    assert_linear_close(actual, "mhsa_forward", x, w_qkv, dtype=expected)
    assert actual.dtype.isnative


def test_mhsa_half_overflow_is_infinite_without_a_warning():
    with np.errstate(all="raise"):
        assert np.isposinf(mhsa_forward(np.full((3, 2), 99, np.float16), np.ones((2, 6), np.float16))).all()


@pytest.mark.parametrize("n", [3, 50])
def test_mhsa_inputs_of_any_layout_stay_untouched(n):
    x, w_qkv = normal(2, n, 4), normal(4, 12, seed=1)
    expected = mhsa_forward(x, w_qkv)
    for view in (
        np.asfortranarray,
        lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
        lambda a: a[..., ::-1].copy()[..., ::-1],
    ):
        x_view, w_view = view(x), view(w_qkv)
        x_view.flags.writeable = w_view.flags.writeable = False
        np.testing.assert_allclose(mhsa_forward(x_view, w_view), expected, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(x_view, x)
        np.testing.assert_array_equal(w_view, w_qkv)


X, W = normal(5, 4), normal(4, 12)


@pytest.mark.parametrize(
    ("x", "w_qkv", "error", "message"),
    [
        (X, normal(4, 8), ValueError, r"w_qkv must have shape \(4, 12\) to match x with 4 features, got \(4, 8\)"),
        (X, normal(3, 12), ValueError, r"w_qkv must have shape \(4, 12\) .* got \(3, 12\)"),
        (X, normal(12), ValueError, r"w_qkv must have shape \(4, 12\) .* got \(12,\)"),
        (X, normal(2, 4, 8), ValueError, r"w_qkv must have shape \(..., 4, 12\) .* got \(2, 4, 8\)"),
        (normal(4), W, ValueError, r"x must have shape \(..., N, D\), got \(4,\)"),
        (3.0, W, ValueError, r"x must have shape \(..., N, D\), got \(\)"),
        (normal(2, 5, 4), normal(3, 4, 12), ValueError, r"axes of x and w_qkv must broadcast, got \(2,\) and \(3,\)"),
        (X, W * 1j, TypeError, r"w_qkv must be float32, .* got complex64"),
        (X.astype(object), W, TypeError, r"x must be .* got object"),
        ([["a"]], W, TypeError, r"x must be .* got <U1"),
        (X.astype(np.longdouble), W, TypeError, rf"x must be .* got {np.dtype(np.longdouble)}"),
    ],
)  # fmt: skip
def test_mhsa_errors(x, w_qkv, error, message):
    with pytest.raises(error, match=message):
        mhsa_forward(x, w_qkv)
