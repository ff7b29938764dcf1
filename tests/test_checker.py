"""The checker is checked: it passes what is right and rejects what is wrong."""

import checker
import ml_dtypes
import numpy as np
import pytest
from checker import assert_attention_close, assert_no_worse_than_plain, ulp

from fastattn import reference

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
ONE_BATCH = (1, 2, 6, 5)


def inputs(dtype=np.float32, shape=ONE_BATCH, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


def plain(q, k, v, **options):
    """What NumPy makes of it in the accumulation type, in the dtype of q."""
    accumulation = np.float64 if q.dtype == np.float64 else np.float32
    return reference.attention(q, k, v, dtype=accumulation, **options).astype(q.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"kv_lens": [3], "sinks": [0.5, -1.0]}])
def test_plain_numpy_passes(dtype, options):
    q, k, v = inputs(dtype)
    assert_attention_close(plain(q, k, v, **options), q, k, v, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_out_and_num_threads_are_no_concern_of_the_oracle(dtype):
    q, k, v = inputs(dtype)
    assert_attention_close(plain(q, k, v), q, k, v, out=np.empty_like(q), num_threads=2)


@pytest.mark.parametrize("kind", [list, np.int64, np.bool_])
def test_integers_must_give_float64(kind):
    q, k, v = (np.ones((2, 3), int).tolist() if kind is list else np.ones((2, 3), kind) for _ in range(3))
    assert_attention_close(np.ones((2, 3)), q, k, v)
    with pytest.raises(AssertionError, match="expected dtype float64, got float32"):
        assert_attention_close(np.ones((2, 3), np.float32), q, k, v)


def allowed_error(q, k, v, **options):
    """The bound of the contract for one float32 or float64 call, written out again."""
    true = reference.attention(q, k, v, dtype=np.longdouble, **options)
    plain_error = np.abs(reference.attention(q, k, v, dtype=q.dtype, **options) - true).max()
    return float(2 * plain_error + 4 * np.finfo(q.dtype).eps * np.abs(v).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sign", [-1, 1])
def test_three_times_the_allowed_error_in_one_entry_is_rejected(dtype, sign):
    q, k, v = inputs(dtype)
    allowed = allowed_error(q, k, v)
    exact = reference.attention(q, k, v)
    for share, passes in ((0.5, True), (3.0, False)):
        actual = exact.copy()
        actual[0, 1, 2, 3] += sign * share * allowed
        actual = actual.astype(dtype)
        if passes:
            assert_attention_close(actual, q, k, v)
        else:
            with pytest.raises(AssertionError, match=r"error above .* in 1 of 60 entries, first at \(0, 1, 2, 3\)"):
                assert_attention_close(actual, q, k, v)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bound_is_twice_the_error_of_plain_numpy_where_scores_are_large(dtype):
    if dtype is np.float64 and np.finfo(np.longdouble).eps == np.finfo(np.float64).eps:
        pytest.skip("this platform has no type wider than float64 to measure NumPy's error with")
    q, k, v = inputs(dtype)
    k = k[..., :1, :] + k / dtype(1000)  # large scores, close together: their rounding shows in the weights
    options = {"scale": 1000.0}
    allowed = allowed_error(q, k, v, **options)
    assert allowed > 50 * np.finfo(dtype).eps * np.abs(v).max()  # the relative part of the bound rules
    actual = np.zeros_like(v)
    known = np.zeros(v.shape)
    known[0, 0, 0, 0] = 0.9 * allowed
    assert_attention_close(actual, q, k, v, expected=known, **options)
    known[0, 0, 0, 0] = 1.1 * allowed
    with pytest.raises(AssertionError, match="error above"):
        assert_attention_close(actual, q, k, v, expected=known, **options)


def test_float64_is_judged_without_a_wider_type_too(monkeypatch):
    monkeypatch.setattr(checker, "_HAS_WIDE_ORACLE", False)
    q, k, v = inputs(np.float64)
    assert_attention_close(plain(q, k, v), q, k, v)
    with pytest.raises(AssertionError, match="error above"):
        assert_attention_close(plain(q, k, v) + 1e-14, q, k, v)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types_may_be_one_ulp_of_the_largest_value_off(dtype):
    q, k, v = inputs(dtype)
    v = np.full_like(v, 1.5)
    step = np.asarray(ulp(1.5, np.dtype(dtype)), dtype)
    assert_attention_close(v + step, q, k, v)
    with pytest.raises(AssertionError, match="error above"):
        assert_attention_close(v + step + step, q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_result_is_rejected(dtype):
    q, k, v = inputs(dtype, (3, 5, 5))
    actual = plain(q, k, v)
    with pytest.raises(AssertionError, match="error above"):
        assert_attention_close(actual.swapaxes(-1, -2), q, k, v)
    with pytest.raises(AssertionError, match="error above"):
        assert_attention_close(actual[[1, 0, 2]], q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_swapped_for_zero_is_rejected(dtype):
    q, k, v = inputs(dtype)
    v[0, 1, 2, 3] = np.nan
    actual = plain(q, k, v)
    assert np.isnan(actual[0, 1, :, 3].astype(np.float64)).all()
    assert_attention_close(actual, q, k, v)
    actual[0, 1, 4, 3] = 0
    with pytest.raises(AssertionError, match=r"NaN or infinity in the wrong place in 1 of .* first at \(0, 1, 4, 3\)"):
        assert_attention_close(actual, q, k, v)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_non_finite_entry_among_finite_ones_is_rejected(wrong):
    q, k, v = inputs()
    actual = plain(q, k, v)
    actual[0, 0, 0, 0] = wrong
    with pytest.raises(AssertionError, match="wrong place"):
        assert_attention_close(actual, q, k, v)


def test_infinity_of_the_wrong_sign_is_rejected():
    q, k, v = inputs()
    v[0, 0, 0, 0] = np.inf
    actual = plain(q, k, v)
    assert_attention_close(actual, q, k, v)
    actual[0, 0, 3, 0] *= -1
    with pytest.raises(AssertionError, match="wrong place"):
        assert_attention_close(actual, q, k, v)


def test_overflowing_sums_may_be_infinite_but_of_the_right_sign():
    q, k, _ = inputs()
    v = np.full(ONE_BATCH, np.float32(3e38))
    assert_attention_close(np.full(ONE_BATCH, np.float32(np.inf)), q, k, v)
    for wrong in (-np.inf, np.nan):
        with pytest.raises(AssertionError, match="wrong place"):
            assert_attention_close(np.full(ONE_BATCH, np.float32(wrong)), q, k, v)


def test_scores_beyond_float32_may_be_nan_as_in_numpy():
    q, k, v = (np.full((1, 1), number, np.float32) for number in (1e20, 1e20, 1.0))
    for right in (np.nan, 1.0):
        assert_attention_close(np.full((1, 1), np.float32(right)), q, k, v)
    with pytest.raises(AssertionError, match="wrong place"):
        assert_attention_close(np.full((1, 1), np.float32(np.inf)), q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_shape_is_rejected(dtype):
    q, k, v = inputs(dtype)
    actual = plain(q, k, v)
    for wrong in (actual[0], actual[:, :1], actual[..., None], actual.reshape(2, 1, 6, 5)):
        with pytest.raises(AssertionError, match=r"expected shape \(1, 2, 6, 5\), got"):
            assert_attention_close(wrong, q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_dtype_is_rejected(dtype):
    q, k, v = inputs(dtype)
    actual = plain(q, k, v)
    for wrong in DTYPES:
        if wrong is not dtype:
            with pytest.raises(AssertionError, match="expected dtype"):
                assert_attention_close(actual.astype(wrong), q, k, v)


def test_what_is_not_an_array_is_rejected():
    q, k, v = inputs()
    with pytest.raises(AssertionError, match="expected an ndarray, got list"):
        assert_attention_close(plain(q, k, v).tolist(), q, k, v)


def test_tiny_number_in_an_empty_row_is_rejected():
    q, k, v = inputs()
    options = {"kv_lens": [3], "causal": True}  # 6 queries, 3 keys: the first 3 see nothing
    actual = plain(q, k, v, **options)
    assert_attention_close(actual, q, k, v, **options)
    actual[0, 0, 2, 0] = 1e-30
    with pytest.raises(AssertionError, match="sees no key is not 0"):
        assert_attention_close(actual, q, k, v, **options)


def test_large_unseen_value_does_not_loosen_the_bound():
    q, k, v = inputs()
    v[..., 4:, :] = 1e30
    actual = plain(q, k, v, kv_lens=4)
    assert_attention_close(actual, q, k, v, kv_lens=4)
    with pytest.raises(AssertionError, match="error above"):
        assert_attention_close(actual + np.float32(1), q, k, v, kv_lens=4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_lse_is_judged_too(dtype):
    q, k, v = inputs(dtype)
    accumulation = np.float64 if dtype == np.float64 else np.float32
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True, dtype=accumulation)
    out = out.astype(dtype)
    options = {"causal": True, "return_lse": True}
    assert_attention_close((out, lse), q, k, v, **options)
    with pytest.raises(AssertionError, match="lse: error above"):
        assert_attention_close((out, lse * accumulation(1.001)), q, k, v, **options)
    with pytest.raises(AssertionError, match="lse: expected shape"):
        assert_attention_close((out, lse[..., None]), q, k, v, **options)
    with pytest.raises(AssertionError, match="lse: expected dtype"):
        assert_attention_close((out, lse.astype(np.float16)), q, k, v, **options)
    with pytest.raises(AssertionError, match=r"expected \(out, lse\), got ndarray"):
        assert_attention_close(out, q, k, v, **options)


def test_expected_replaces_the_oracle():
    q, k, v = inputs()
    known = np.zeros(ONE_BATCH)
    assert_attention_close(np.zeros(ONE_BATCH, np.float32), q, k, v, expected=known + 1e-9)
    lse = np.ones(ONE_BATCH[:-1], np.float32)
    pair = known.astype(np.float32), lse
    assert_attention_close(pair, q, k, v, expected=(known, lse), return_lse=True)
    with pytest.raises(AssertionError, match="lse: error above"):
        assert_attention_close(pair, q, k, v, expected=(known, lse + 1), return_lse=True)
    with pytest.raises(AssertionError, match="error above"):
        assert_attention_close(plain(q, k, v), q, k, v, expected=plain(q, k, v) + 1)
    with pytest.raises(AssertionError, match="expected shape"):
        assert_attention_close(plain(q, k, v), q, k, v, expected=known[0])


def test_other_results_use_the_same_rule():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 9, 4)).astype(np.float32) for _ in range(3))
    true, measured = reference.linear_attention(q, k, v), reference.linear_attention(q, k, v, dtype=np.float32)
    bound = {"dtype": np.float32, "largest_value": np.abs(v).max()}
    assert_no_worse_than_plain(measured, true, measured, **bound)
    allowed = 2 * np.abs(measured - true).max() + 4 * np.finfo(np.float32).eps * np.abs(v).max()
    with pytest.raises(AssertionError, match="error above"):
        assert_no_worse_than_plain((true + 3 * allowed).astype(np.float32), true, measured, **bound)


def test_plain_numpy_excuses_only_what_is_not_finite_and_not_known():
    one, nan = np.ones(1, np.float32), np.full(1, np.nan, np.float32)
    rule = {"dtype": np.float32, "largest_value": 1.0}
    assert_no_worse_than_plain(nan, one, nan, **rule)
    with pytest.raises(AssertionError, match="wrong place"):
        assert_no_worse_than_plain(one, nan, one, **rule)
    with pytest.raises(AssertionError, match="wrong place"):
        assert_no_worse_than_plain(nan, one, nan, known=one, **rule)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1.0, 1.5, 1.75, -2.0, 100.0, 1e-3])
def test_ulp_is_the_gap_to_the_next_number(dtype, value):
    number = np.asarray(value, dtype)
    bits = np.dtype(f"u{number.dtype.itemsize}")
    following = np.asarray(np.abs(number).view(bits) + bits.type(1), bits).view(dtype)
    assert ulp(float(number), np.dtype(dtype)) == float(following) - float(np.abs(number))


def test_ulp_of_zero_and_of_subnormals_is_the_smallest_subnormal():
    assert ulp(3e-7, np.dtype(np.float16)) == 2.0**-24
    assert ulp(0.0, np.dtype(np.float16)) == 2.0**-24
    assert ulp(0.0, np.dtype(ml_dtypes.bfloat16)) == 2.0**-133
