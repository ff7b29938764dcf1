"""Every option of `attention` alone and several together, against the oracle; and what NaN and infinity may touch."""

import itertools

import numpy as np
import pytest
from checker import assert_attention_close
from inputs import BFLOAT16, DTYPES, normal, qkv

from fastattn import attention

pytestmark = pytest.mark.usefixtures("isa")

B, H, K, N, S = 2, 4, 2, 5, 37
LOWEST = float(np.finfo(np.float32).min)


def check(q, k, v, **options):
    assert_attention_close(attention(q, k, v, **options), q, k, v, **options)


def bools(*shape, seed=7):
    return np.random.default_rng([seed, *shape]).random(shape) > 0.3


ONE_OPTION = {
    "bool mask": {"mask": bools(N, S)},
    "bool mask of keys": {"mask": bools(S)},
    "bool mask of entries": {"mask": bools(B, 1, 1, S)},
    "0-d bool mask": {"mask": np.array(True)},
    "0-d bool mask that hides all": {"mask": np.array(False)},
    "mask as a list": {"mask": [True, False] * 18 + [True]},
    "float16 mask": {"mask": normal(H, N, S, dtype=np.float16)},
    "bfloat16 mask": {"mask": normal(H, 1, S, dtype=BFLOAT16)},
    "float32 mask": {"mask": normal(B, H, N, S)},
    "float64 mask": {"mask": normal(N, S, dtype=np.float64) * 1e3},
    "float mask with -inf": {"mask": np.where(bools(N, S), normal(N, S), np.float32(-np.inf))},
    "0-d float mask": {"mask": np.array(2.5, np.float16)},
    "bias": {"bias": normal(H, N, S)},
    "float64 bias with -inf": {"bias": np.where(bools(B, 1, N, S), normal(B, 1, N, S), -np.inf)},
    "mask and bias": {"mask": bools(N, S), "bias": normal(H, 1, S)},
    "float mask and bias": {"mask": normal(N, S), "bias": normal(H, 1, S, dtype=BFLOAT16)},
    "causal": {"causal": True},
    "window left": {"window": (3, None)},
    "window right": {"window": (-1, 2)},
    "window both": {"window": (4, 1)},
    "window itself": {"window": (0, 0)},
    "window unbounded": {"window": [None, -1]},
    "window of NumPy integers": {"window": (np.int64(3), np.uint8(2))},
    "window wider than all": {"window": (10**30, 2**63)},
    "causal window": {"causal": True, "window": (6, 9)},
    "offset": {"causal": True, "q_offset": 3},
    "negative offset": {"causal": True, "q_offset": -2},
    "offset without causal changes nothing": {"q_offset": 3},
    "offset per entry": {"causal": True, "q_offset": [30, 2]},
    "enormous offset": {"causal": True, "q_offset": 2**62},
    "window around an offset": {"window": (2, 3), "q_offset": np.array([8, 20], np.uint32)},
    "one length": {"kv_lens": 20},
    "lengths": {"kv_lens": [0, 37]},
    "lengths of type uint8": {"kv_lens": np.array([13, 36], np.uint8)},
    "causal with lengths": {"causal": True, "kv_lens": (3, 20)},
    "causal with lengths and offset": {"causal": True, "kv_lens": [30, 20], "q_offset": [10, 25]},
    "scale": {"scale": 0.3},
    "scale 0": {"scale": 0},
    "negative scale": {"scale": -1.5},
    "scale of type float64": {"scale": np.float64(0.25)},
    "0-d scale": {"scale": np.array(0.25)},
    "bfloat16 scale": {"scale": BFLOAT16.type(0.5)},
    "softcap": {"softcap": 1.5},
    "softcap off": {"softcap": 0.0},
    "small softcap": {"softcap": 1e-3, "scale": 10.0},
    "large softcap": {"softcap": 1e6},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0]},
    "alibi per entry": {"alibi_slopes": normal(B, H, dtype=np.float16)},
    "alibi of integers": {"alibi_slopes": np.arange(H), "causal": True},
    "alibi with offset and lengths": {"alibi_slopes": np.ones(H) / 4, "q_offset": [1, 30], "kv_lens": [37, 9]},
    "sinks": {"sinks": [0.0, -1.0, 3.0, -np.inf]},
    "large sinks": {"sinks": np.array([1000.0, -1000.0, 80.0, -80.0], np.float32)},
    "bfloat16 sinks": {"sinks": normal(H, dtype=BFLOAT16)},
    "sinks with nothing to see": {"sinks": np.arange(H), "mask": np.zeros(S, bool)},
}
EVERYTHING = {
    "mask": bools(B, 1, N, S), "bias": normal(H, N, S), "causal": True, "window": (30, None), "q_offset": [28, 20],
    "kv_lens": [35, 22], "scale": -0.7, "softcap": 2.0, "alibi_slopes": normal(H), "sinks": normal(H),
}  # fmt: skip


@pytest.mark.parametrize("option", ONE_OPTION)
@pytest.mark.parametrize("dtypes", ["float32", "float64", "bfloat16"])
def test_one_option(dtypes, option):
    check(*qkv(B, H, K, N, S, dtypes=dtypes), **ONE_OPTION[option], return_lse=True)


@pytest.mark.parametrize("dtypes", DTYPES)
def test_all_options_together(dtypes):
    check(*qkv(B, H, K, N, S, dtypes=dtypes), **EVERYTHING, return_lse=True)


@pytest.mark.parametrize("dtypes", ["float32", "float64", "float16"])
def test_pairs_of_options(dtypes):
    arrays = qkv(B, H, K, N, S, dtypes=dtypes)
    for names in itertools.combinations(EVERYTHING, 2):
        check(*arrays, **{name: EVERYTHING[name] for name in names})


MASK_SHAPES = [
    (), (1,), (S,), (N, 1), (1, S), (N, S), (H, 1, 1), (H, N, S), *itertools.product((1, B), (1, H), (1, N), (1, S)),
]  # fmt: skip


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_mask_shapes(shape):
    arrays = qkv(B, H, K, N, S)
    numbers = np.asarray(normal(*shape, seed=3))
    for mask in (numbers > -0.5, numbers, numbers.astype(np.float16)):
        check(*arrays, mask=mask, return_lse=True)
    check(*arrays, bias=numbers)


@pytest.mark.parametrize("n_keys", [95, 97, 191, 193, 400])
@pytest.mark.parametrize("dtypes", ["float32", "float64"])
def test_masks_over_several_blocks(dtypes, n_keys):
    q, k, v = qkv(1, 2, 1, 21, n_keys, dtypes=dtypes)
    diagonal = np.abs(np.arange(n_keys) - np.arange(21)[:, None] * 7)
    for mask in (diagonal < 5, np.arange(n_keys) >= n_keys - 3, normal(21, n_keys), diagonal > n_keys):
        check(q, k, v, mask=mask, return_lse=True)
        check(q, k, v, mask=mask, causal=True, window=(150, 0), return_lse=True)


@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 63, 64, 66, 67, 100])
def test_window_widths(width):
    q, k, v = qkv(1, 2, 1, 67, 67)
    check(q, k, v, window=(width, 0))
    check(q, k, v, window=(0, width), return_lse=True)
    check(q[:, :, -2:], k, v, window=(width, 3))


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("page", [1, 3, 16, 200])
def test_pages(dtypes, page):
    n_pages = 400 // page
    lengths = np.array([min(390, (n_pages - 1) * page), page // 2, 0])
    table = np.random.default_rng(0).integers(0, n_pages, (3, n_pages))
    q, _, _ = qkv(3, 4, 2, 3, 1, dtypes=dtypes)
    _, k, v = qkv(n_pages, 4, 2, 1, page, dtypes=dtypes)
    mask = bools(3, n_pages * page)
    for options in ({}, {"causal": True}, {"mask": mask, "window": (100, 0)}):
        check(q, k, v, block_table=table, kv_lens=lengths, **options, return_lse=True)


@pytest.mark.parametrize("n_queries", [1, 3, 40])
@pytest.mark.parametrize("n_pages", [0, 1, 5])
def test_pages_without_rows(n_pages, n_queries):
    q, k, v = qkv(n_pages, 4, 2, n_queries, 0)
    q = normal(2, 4, n_queries, 8)
    table = np.zeros((2, n_pages), np.int64)
    for options in ({}, {"causal": True}, {"sinks": normal(4)}):
        check(q, k, v, block_table=table, kv_lens=[0, 0], **options, return_lse=True)


def test_pages_that_are_not_in_use_are_not_read():
    q, k, v = qkv(2, 2, 2, 3, 1)
    _, k, v = qkv(5, 2, 2, 1, 4)
    k[[0, 4]], v[[0, 4]] = np.nan, np.nan
    k[2, :, 1:], v[2, :, 1:] = np.inf, np.inf
    table = np.array([[1, 2, -7], [3, 99, 4]])
    result = attention(q, k, v, block_table=table, kv_lens=[5, 4])
    assert np.isfinite(result).all()
    assert_attention_close(result, q, k, v, block_table=table, kv_lens=[5, 4])


# What an excluded key is excluded by; keys 3 and later of 6.
EXCLUSIONS = {
    "bool mask": {"mask": np.arange(6) < 3},
    "float mask": {"mask": np.where(np.arange(6) < 3, 0.5, -np.inf).astype(np.float32)},
    "bias": {"bias": np.where(np.arange(6) < 3, 0.5, -np.inf)},
    "length": {"kv_lens": [3]},
    "causal": {"causal": True, "q_offset": 2, "window": None},
    "window": {"window": (2, 0), "q_offset": 2},
}


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("exclusion", EXCLUSIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_excluded_data_never_reaches_the_output(dtypes, exclusion, bad):
    for heads in (2, 40):
        q, k, v = qkv(1, heads, 2, 1, 6, 8, dtypes=dtypes)
        k[:, :, 3:], v[:, :, 3:] = bad, bad
        result = attention(q, k, v, **EXCLUSIONS[exclusion], sinks=np.zeros(heads), softcap=4.0)
        assert np.isfinite(result.astype(np.float32)).all()
        check(q, k, v, **EXCLUSIONS[exclusion])


@pytest.mark.parametrize("dtypes", ["float32", "float64", "float16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_data_reaches_the_rows_that_see_it(dtypes, bad):
    """A causal call over several blocks: bad numbers at keys 3, 100 and the last."""
    q, k, v = qkv(1, 1, 1, 210, 210, 8, dtypes=dtypes)
    for key in (3, 100, 209):
        wrong = v.copy()
        wrong[0, 0, key, 5] = bad
        check(q, k, wrong, causal=True)
        if np.isnan(bad):
            wrong = k.copy()
            wrong[0, 0, key, 5] = bad
            check(q, wrong, v, causal=True, return_lse=True)
            check(q, wrong, v, mask=np.arange(210) != key)
    result = attention(q, k, v, window=(0, 0))
    assert np.array_equal(result, np.broadcast_to(v, result.shape))


@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_bad_query_spoils_its_own_row_only(dtypes):
    q, k, v = qkv(1, 4, 2, 9, 21, 8, dtypes=dtypes)
    q[0, 1, 4] = np.nan
    result, lse = attention(q, k, v, return_lse=True)
    row_is_bad = np.zeros((1, 4, 9), bool)
    row_is_bad[0, 1, 4] = True
    assert np.array_equal(np.isnan(result.astype(np.float32)).all(-1), row_is_bad)
    assert np.array_equal(np.isnan(result.astype(np.float32)).any(-1), row_is_bad)
    assert np.array_equal(np.isnan(lse), row_is_bad)
    check(q, k, v, mask=np.zeros(21, bool))


def test_nan_shows_even_if_its_weight_would_underflow():
    q, k, v = qkv(1, 1, 1, 1, 5)
    v[..., 2, 3] = np.nan
    check(q, k, v, mask=np.array([0, 0, -1e30, 0, 0]))
    assert np.isnan(attention(q, k, v, mask=np.array([0, 0, -1e30, 0, 0]))[..., 3]).all()


def test_nan_in_masks_and_biases():
    q, k, v = qkv(1, 2, 2, 3, 6)
    addend = normal(3, 6)
    addend[1, 4] = np.nan
    for option in ("mask", "bias"):
        check(q, k, v, **{option: addend}, return_lse=True)
        result = attention(q, k, v, **{option: addend})
        assert np.isnan(result[:, :, 1]).all()
        assert np.isfinite(result[:, :, [0, 2]]).all()
        check(q, k, v, **{option: addend}, causal=True, q_offset=2)  # excluded: harmless
        assert np.isfinite(attention(q, k, v, **{option: addend}, kv_lens=4)).all()
    assert np.isfinite(attention(q, k, v, bias=addend, mask=np.arange(6) != 4)).all()
    assert np.isfinite(attention(q, k, v, bias=addend, mask=np.where(np.arange(6) != 4, 0, -np.inf))).all()


def test_nan_sink():
    q, k, v = qkv(1, 2, 2, 3, 6)
    result, lse = attention(q, k, v, sinks=[np.nan, 0.0], return_lse=True)
    assert_attention_close((result, lse), q, k, v, sinks=[np.nan, 0.0], return_lse=True)
    assert np.isnan(result[:, 0]).all()
    assert np.isnan(lse[:, 0]).all()
    assert np.isfinite(result[:, 1]).all()


@pytest.mark.parametrize("dtypes", ["float32", "float16"])
@pytest.mark.parametrize("lowest", [LOWEST, float(np.finfo(np.float64).min), -1e30])
def test_rows_full_of_the_lowest_number_give_the_mean(dtypes, lowest):
    q, k, v = qkv(1, 2, 2, 3, 250, dtypes=dtypes)
    for option in ("mask", "bias"):
        result, lse = attention(q, k, v, **{option: np.full((3, 250), lowest)}, return_lse=True)
        assert np.isfinite(lse).all()
        wide = v.astype(np.float64)
        assert np.allclose(result.astype(np.float64), wide.mean(2, keepdims=True), atol=2e-3)
        check(q, k, v, **{option: np.where(np.arange(250) < 100, lowest, 0)})
    both = np.full((3, 250), lowest)
    assert np.isfinite(attention(q, k, v, mask=both, bias=both).astype(np.float32)).all()


def test_largest_addends_are_clamped():
    q, k, v = qkv(1, 2, 2, 2, 4)
    mask = np.array([[1e300, 0, 0, 0], [0, -1e300, -np.inf, 0]])
    result = attention(q, k, v, mask=mask)
    assert np.array_equal(result[:, :, 0], v[:, :, 0])
    check(q, k, v, mask=mask)


def test_infinite_scores_by_arithmetic():
    q, k, v = qkv(1, 1, 1, 3, 5)
    q[0, 0, 0], k[0, 0, 2] = 1e30, 1e30  # +inf at one key: NaN
    check(q, k, v)
    assert np.isnan(attention(q, k, v)[0, 0, 0]).all()
    q[0, 0, 0], k[...] = -1e30, 1e30  # -inf at every key, by no mask: NaN
    result = attention(q, k, v)
    assert np.isnan(result[0, 0, 0]).all()
    assert (attention(q, k, v, mask=np.zeros(5, bool)) == 0).all()


def test_subnormal_values_survive():
    q, k = np.zeros((1, 1, 3, 4), np.float32), np.zeros((1, 1, 8, 4), np.float32)
    result = attention(q, k, np.full((1, 1, 8, 4), 1e-40, np.float32))
    assert np.allclose(result / np.float32(1e-40), 1, atol=1e-3)


@pytest.mark.parametrize("dtypes", ["float32", "float16", "bfloat16", "float32-float16"])
def test_scores_beyond_the_half_types(dtypes):
    q_dtype, kv_dtype = DTYPES[dtypes]
    q, k = np.full((1, 1, 1, 64), 100, q_dtype), np.full((1, 1, 3, 64), 99, kv_dtype)
    k[0, 0, 1] = 104  # exact in every half type
    v = normal(1, 1, 3, 64, dtype=kv_dtype)
    assert np.array_equal(attention(q, k, v)[0, 0, 0], v[0, 0, 1])
    check(-q, k, v)


def test_half_results_are_rounded_to_nearest_even():
    q, k = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 2, 1), np.float32)
    for dtype, unit in ((np.float16, 2**-10), (BFLOAT16, 2**-7)):
        v = np.array([[1, 1, -1], [1 + unit, 1 + unit, -1 - unit]], dtype)[None, None]
        v[0, 0, 0, 1] = 1 + 2 * unit  # halfway between 1 + unit and 1 + 2 unit
        result = attention(q.astype(dtype), k.astype(dtype), v)[0, 0, 0].astype(np.float64)
        assert result.tolist() == [1, 1 + 2 * unit, -1]


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_largest_half_values(dtype):
    largest = float(65504) if dtype == np.float16 else 3.389e38
    q, k = np.zeros((1, 1, 1, 2), dtype), np.zeros((1, 1, 1, 2), dtype)
    v = np.array([largest, -largest], dtype)[None, None, None]
    assert np.array_equal(attention(q, k, v), v)


@pytest.mark.parametrize("softcap", [1e-300, 1e-46, 1e-45, 1e-38])
@pytest.mark.parametrize("dtypes", ["float32", "float64", "float16"])
def test_caps_too_small_for_the_type_leave_scores_equal(dtypes, softcap):
    q, k, v = qkv(1, 2, 1, 20, 40, dtypes=dtypes)
    check(q, k, v, softcap=softcap, return_lse=True)


@pytest.mark.parametrize(
    ("dtype", "scale", "query", "keys", "expected"),
    [
        (np.float32, 1e38, 100, [0, 1e-38], 3),
        (np.float32, 1e31, 1e8, [0, 1e-38], 2.99991),
        (np.float32, -1e37, 1, [1e-37, 0], 2.46212),
        (np.float32, 1e-45, 0.5, [-np.inf, 1], 3),
        (np.float32, 1e-37, 1e20, [0, 1e17], 2.46212),
        (np.float32, 1e300, 0, [1, 2], 2),
        (np.float64, 1e299, 1e10, [0, 1e-308], 2.99991),
        (np.float64, 1e-305, 1e155, [0, 1e150], 2.46212),
    ],
)
def test_extreme_scales(dtype, scale, query, keys, expected):
    """What matters is the score, query * key * scale; here they are 0 and one more number."""
    for rows in (1, 40):
        q, k = np.full((rows, 1), query, dtype), np.array(keys, dtype)[:, None]
        v = np.array([[1], [3]], dtype)
        np.testing.assert_allclose(attention(q, k, v, scale=scale), np.full((rows, 1), expected), rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 40])
def test_biases_leave_equal_scores_equal_and_finite_ones_finite(rows):
    values = np.arange(8, dtype=np.float32)[:, None]
    bias = np.zeros((rows, 8), np.float32)
    bias[:, ::2] = 1
    for query in (7, 9, 11):
        q = np.full((rows, 1), query, np.float32)
        mean = attention(q, np.ones_like(values), values, scale=1e20, bias=bias)
        assert (mean == 3.5).all()  # as in NumPy: beside scores of 7e20 a bias of 1 is nothing
    # The product of key and scale rounds to the largest float from above.
    key, scale = np.float32(16531789 * 2.0**90), 8513143 * 2.0**-9
    q, k = np.ones((rows, 1), np.float32), np.full_like(values, key)
    for size in (1e30, 2e30):
        bias = np.full((rows, 8), size, np.float32)
        assert (attention(q, k, values, scale=scale, bias=bias) == 3.5).all()
    # So may be what ALiBi and a bias come to.
    bias = np.full((rows, 8), np.finfo(np.float32).max)
    assert (attention(q, k, values, scale=0, bias=bias, alibi_slopes=[-1e37]) == 3.5).all()


def test_sinks_beyond_double_precision_stay_finite():
    x = np.ones((2, 3, 4), np.float32)
    sinks = np.array([2, -2], np.longdouble) * np.finfo(np.float64).max
    out = attention(x, x, x, sinks=sinks)
    assert (out[0] == 0).all()
    assert (out[1] == 1).all()
