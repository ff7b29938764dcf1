"""bfloat16 queries and keys: the scores of every level, where one level multiplies features in pairs.

Scores show in the log-sum-exp, which is float32 and judged by float32's rule; outputs are rounded to bfloat16.
"""

import numpy as np
import pytest
from checker import assert_attention_close
from inputs import BFLOAT16, normal, qkv

from fastattn import attention, reference

pytestmark = pytest.mark.usefixtures("isa")

TINY = BFLOAT16.type(2.0**-133)  # the smallest subnormal number
HUGE = BFLOAT16.type(2.0**127)


def check(q, k, v, **options):
    result = attention(q, k, v, return_lse=True, **options)
    assert_attention_close(result, q, k, v, return_lse=True, **options)
    return result


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("n_queries", [1, 8, 9, 16, 17, 32, 33, 70])
def test_head_dims(n_queries, dim):
    check(*qkv(1, 2, 2, n_queries, 21, dim, 3, dtypes="bfloat16"))


@pytest.mark.parametrize("n_keys", [1, 2, 7, 8, 9, 15, 16, 17, 63, 65, 255, 256, 257, 300])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}, {"window": (20, 5)}], ids=str)
def test_key_tails(n_keys, options):
    check(*qkv(1, 1, 1, 19, n_keys, 7, 5, dtypes="bfloat16"), **options)


@pytest.mark.parametrize("dim", [1, 6, 7])
def test_layouts_and_pages(dim):
    q, k, v = qkv(2, 2, 2, 40, 32, dim, dtypes="bfloat16")
    expected, lse = check(q, k, v)
    spaced = np.zeros((*k.shape[:-1], 3 * dim), k.dtype)
    spaced[..., ::3] = k
    for keys in (spaced[..., ::3], k[..., ::-1].copy()[..., ::-1], k.swapaxes(1, 2).copy().swapaxes(1, 2)):
        assert np.array_equal(attention(q, keys, v), expected)
    assert np.array_equal(attention(q[:, :, ::-1].copy()[:, :, ::-1], k, v), expected)
    pages, lengths = np.arange(16).reshape(2, 8)[:, ::-1], np.array([32, 32])
    paged = [np.zeros((16, 2, 4, dim), k.dtype) for _ in range(2)]
    for pool, rows in zip(paged, (k, v), strict=True):
        for entry, page in np.ndindex(2, 8):
            pool[pages[entry, page]] = rows[entry, :, 4 * page : 4 * page + 4]
    out, paged_lse = attention(q, *paged, block_table=pages, kv_lens=lengths, return_lse=True)
    assert np.array_equal(out, expected)
    assert np.array_equal(paged_lse, lse)


@pytest.mark.parametrize("scale", [1.0, -0.5, 0.0, 3.0, 1e-35, -1e32])
def test_scales(scale):
    check(*qkv(1, 1, 1, 20, 30, 9, dtypes="bfloat16"), scale=scale)


@pytest.mark.parametrize("feature", [0, 1, 4])
@pytest.mark.parametrize("tiny_queries", [True, False])
@pytest.mark.parametrize("n_queries", [1, 8, 20])
def test_subnormal_queries_and_keys_count(n_queries, tiny_queries, feature):
    # 100 * 2**-133 * 2**127 is 1.5625: a score that is 0 where subnormal numbers are taken as 0.
    q, k, v = (np.zeros((n_queries, 5), BFLOAT16), np.zeros((40, 5), BFLOAT16), normal(40, 4, dtype=BFLOAT16))
    tiny, huge = (q, k) if tiny_queries else (k, q)
    tiny[::3, feature], huge[::2, feature] = TINY * BFLOAT16.type(100), HUGE
    out, _ = check(q, k, v, scale=1.0)
    assert not np.array_equal(out[0], attention(np.zeros_like(q), k, v)[0])


def test_a_hidden_subnormal_key_changes_no_bit():
    q, k, v = qkv(1, 1, 1, 40, 50, 33, dtypes="bfloat16")
    mask = np.ones(50, bool)
    mask[[3, 44]] = False
    expected, lse = attention(q, k, v, mask=mask, return_lse=True)
    k[..., [3, 44], 7] = TINY
    out, other_lse = attention(q, k, v, mask=mask, return_lse=True)
    assert np.array_equal(out, expected)
    assert np.array_equal(lse, other_lse)


@pytest.mark.parametrize("feature", [0, 1, 6])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(feature, value):
    q, k, v = qkv(1, 1, 1, 24, 12, 7, dtypes="bfloat16")
    expected = attention(q, k, v)
    q[0, 0, 5, feature] = value
    with np.errstate(invalid="ignore"):
        out, _ = check(q, k, v)
    assert np.array_equal(np.delete(out, 5, axis=2), np.delete(expected, 5, axis=2))


def test_an_infinite_feature_beside_any_other_is_no_nan():
    # The bits of (anything, infinity) as one float are those of a NaN.
    q, k, v = np.ones((24, 2), BFLOAT16), np.ones((10, 2), BFLOAT16), normal(10, 3, dtype=BFLOAT16)
    k[4] = 3, -np.inf
    q[7] = -2, 1
    out, lse = check(q, k, v)
    assert np.isfinite(lse).all()
    assert np.isfinite(out.astype(np.float32)).all()


def test_whole_numbers_are_multiplied_exactly():
    rng = np.random.default_rng(7)
    q, k = (rng.integers(-64, 64, (n, 12)).astype(BFLOAT16) for n in (25, 60))
    v = normal(60, 2, dtype=BFLOAT16)
    _, lse = attention(q, k, v, scale=1 / 64, return_lse=True)
    _, exact = reference.attention(q, k, v, scale=1 / 64, return_lse=True)
    np.testing.assert_allclose(lse, exact, rtol=4e-7, atol=4e-7)
