"""`linear_attention` and `mhsa_forward` where the products of keys and values leave the range of their type.

``Q (K^T V)`` is cheaper than ``(Q K^T) V``, but its intermediate may overflow or vanish where the other does not.
"""

import numpy as np
import pytest

from fastattn import linear_attention, mhsa_forward, reference

BEYOND = {np.float32: 1e30, np.float64: 1e200}


def normal(*shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def assert_near(actual, expected):
    error = np.abs(actual - expected).max(axis=(-2, -1))
    assert (error < 64 * np.finfo(actual.dtype).eps * np.abs(expected).max(axis=(-2, -1))).all()


@pytest.mark.parametrize("dtype", BEYOND)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "s"), [(300, 1500), (300, 300), (40, 2000), (300, 260), (9, 5)])
@pytest.mark.parametrize("large", [False, True], ids=["vanishing", "overflowing"])
def test_linear_keeps_the_range_of_the_plain_products(dtype, causal, n, s, large):
    """And the other heads of the call get the very bits that they get without such a neighbour."""
    q, k, v = (normal(2, heads, rows, 8, dtype=dtype, seed=rows) for heads, rows in ((6, n), (3, s), (3, s)))
    ordinary = linear_attention(q, k, v, causal=causal)
    factor = dtype(BEYOND[dtype] if large else 1 / BEYOND[dtype])
    q[1, 2:4] /= factor
    k[1, 1] *= factor
    v[1, 1] *= factor
    result = linear_attention(q, k, v, causal=causal)
    seen = slice(max(n - s, 0) if causal else 0, None)
    expected = reference.linear_attention(q, k, v, causal=causal, dtype=np.longdouble)
    assert_near(result[..., seen, :], expected[..., seen, :])
    others = np.ones((2, 6), bool)
    others[1, 2:4] = False
    assert np.array_equal(result[others], ordinary[others])


@pytest.mark.parametrize("dtype", BEYOND)
def test_mhsa_keeps_the_range_of_the_plain_products(dtype):
    """Scores of ordinary size, from tiny queries and huge keys. (What vanishes does not count beside ``x + ...``.)"""
    factor = dtype(BEYOND[dtype])
    x, w_qkv = normal(3, 500, 8, dtype=dtype, seed=1), normal(3, 8, 24, dtype=dtype, seed=2)
    ordinary = mhsa_forward(x, w_qkv)
    w_qkv[1, :, :8] /= factor
    w_qkv[1, :, 8:] *= factor
    result = mhsa_forward(x, w_qkv)
    expected = reference.mhsa_forward(x, w_qkv, dtype=np.longdouble)
    assert np.isfinite(expected.astype(dtype)).all()
    assert_near(result, expected)
    assert np.array_equal(result[[0, 2]], ordinary[[0, 2]])


def test_mhsa_of_entries_that_need_different_ways():
    """The folded product leaves the range for the second entry only; the others' bits do not change."""
    x, w_qkv = normal(3, 500, 8, dtype=np.float32, seed=1), normal(3, 8, 24, dtype=np.float32, seed=2)
    ordinary = mhsa_forward(x, w_qkv)
    x[1] *= np.float32(1e-19)
    w_qkv[1] *= np.float32(1e25)
    assert np.array_equal(mhsa_forward(x, w_qkv)[[0, 2]], ordinary[[0, 2]])
    assert_near(mhsa_forward(x, w_qkv), reference.mhsa_forward(x, w_qkv))


@pytest.mark.parametrize("causal", [False, True])
def test_products_that_overflow_in_either_order_stay_infinite(causal):
    x = np.full((400, 4), 1e20, np.float32)
    assert np.array_equal(linear_attention(x, x, x, causal=causal), np.full_like(x, np.inf))
    w_qkv = np.tile(np.eye(4, dtype=np.float32), 3)
    assert np.array_equal(mhsa_forward(x, w_qkv), np.full_like(x, np.inf))
