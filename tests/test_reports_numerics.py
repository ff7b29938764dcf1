"""Numerical faults that users reported of other attention libraries, each tested as a kind rather than as one input.

The reference behind each test is the public report it re-tells. Every result is judged by the oracle.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
from checker import assert_attention_close

from fastattn import attention, attention_varlen, merge_states

pytestmark = pytest.mark.usefixtures("isa")

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
HALVES = [np.float16, ml_dtypes.bfloat16]
GARBAGE = [np.nan, np.inf, -np.inf]
# one query takes the decoding path, 3 fewer than a tile, 40 several tiles
QUERIES = [1, 3, 40]


def rnd(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(n_queries, n_keys, dtype=np.float32, *, n_heads=4, n_kv_heads=2, head_dim=9, value_dim=7, batch=1):
    """Return q, k and v of grouped heads with odd feature counts."""
    return (
        rnd(batch, n_heads, n_queries, head_dim, dtype=dtype),
        rnd(batch, n_kv_heads, n_keys, head_dim, dtype=dtype, seed=1),
        rnd(batch, n_kv_heads, n_keys, value_dim, dtype=dtype, seed=2),
    )


def check(q, k, v, **options):
    """Call `attention` with its lse, compare both with the oracle, and return them."""
    result = attention(q, k, v, return_lse=True, **options)
    assert_attention_close(result, q, k, v, return_lse=True, **options)
    return result


def additive(keep, dtype=np.float32):
    return np.where(keep, 0, -np.inf).astype(dtype)


# Each excludes the keys where `keep` is False, for every query.
EXCLUSIONS = {
    "bool mask": lambda keep: {"mask": keep},
    "float mask": lambda keep: {"mask": additive(keep)},
    "float64 mask": lambda keep: {"mask": additive(keep, np.float64)},
    "bias": lambda keep: {"bias": additive(keep, np.float16)},
    "mask and bias": lambda keep: {
        "mask": keep | (np.arange(keep.size) % 2 > 0),
        "bias": additive(keep | (np.arange(keep.size) % 2 == 0)),
    },
}
PATTERNS = {
    "tail": lambda j, n: j < n - 2,
    "head": lambda j, n: j >= 3,
    "middle": lambda j, n: (j < n // 3) | (j > n // 2),
    "alternate": lambda j, n: j % 2 == 0,
    "all but one": lambda j, n: j == n // 2,
    "all": lambda j, n: j < 0,
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("exclusion", EXCLUSIONS)
def test_garbage_at_masked_keys_stays_out(exclusion, pattern, dtype):
    """pytorch/pytorch#101967, Dao-AILab/flash-attention#2374 and #1745, vllm-project/vllm#47305"""
    for n_queries, n_keys in itertools.product(QUERIES, (5, 70)):
        keep = PATTERNS[pattern](np.arange(n_keys), n_keys)
        q, k, v = qkv(n_queries, n_keys, dtype)
        for garbage in GARBAGE:
            k[:, :, ~keep], v[:, :, ~keep] = garbage, garbage
            out, _ = check(q, k, v, **EXCLUSIONS[exclusion](keep))
            assert np.isfinite(out.astype(np.float64)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n_queries", QUERIES)
def test_garbage_beyond_the_valid_region_stays_out(n_queries, dtype):
    """pytorch/pytorch#101967: the region given by lengths, the diagonal, windows and combinations of them."""
    n_keys, n_bad = 70, 5
    n_good = n_keys - n_bad
    q, k, v = qkv(n_queries, n_keys, dtype)
    tails = [
        {"kv_lens": n_good},
        {"kv_lens": [n_good], "causal": True},
        {"kv_lens": [n_good], "window": (4, 1)},
        {"causal": True, "q_offset": n_good - n_queries},
        {"window": (-1, 0), "q_offset": n_good - n_queries},
        {"window": (3, 2), "q_offset": n_good - n_queries - 2},
    ]
    for garbage in GARBAGE:
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[:, :, n_good:], bad_v[:, :, n_good:] = garbage, garbage
        for options in tails:
            out, _ = check(q, bad_k, bad_v, **options)
            assert np.isfinite(out.astype(np.float64)).all()
        # the keys before the window are garbage
        head_k, head_v = bad_k[:, :, ::-1], bad_v[:, :, ::-1]
        out, _ = check(q, head_k, head_v, window=(n_good - 1, None), q_offset=n_keys - 1)
        assert np.isfinite(out.astype(np.float64)).all()
        # the diagonal runs through the garbage: only the rows that reach it may show it
        check(q, bad_k, bad_v, causal=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_garbage_of_other_members_and_pages_stays_out(dtype):
    """Dao-AILab/flash-attention#2374: neighbours in a packed batch, and pages that are not in use."""
    for garbage in GARBAGE:
        q, k, v = (rnd(12, 2, 8, dtype=dtype, seed=seed) for seed in range(3))
        k[5:9], v[5:9] = garbage, garbage
        out = attention_varlen(q, k, v, [0, 5, 9, 12])
        for start, stop in ((0, 5), (9, 12)):
            member = [x[start:stop].swapaxes(0, 1) for x in (q, k, v)]
            assert_attention_close(out[start:stop].swapaxes(0, 1), *member)
        assert not np.isfinite(out[5:9].astype(np.float64)).all()

        q = rnd(2, 4, 3, 8, dtype=dtype)
        k, v = rnd(6, 2, 4, 8, dtype=dtype, seed=1), rnd(6, 2, 4, 8, dtype=dtype, seed=2)
        for pages in (k, v):
            pages[[0, 3]] = garbage  # page 3 is in no table, page 0 only past the lengths
            pages[5, :, 2:] = garbage  # the valid keys of entry 0 end inside page 5
        out, _ = check(q, k, v, block_table=[[2, 5, 0], [4, 1, 0]], kv_lens=[6, 8])
        assert np.isfinite(out.astype(np.float64)).all()


@pytest.mark.parametrize("exclude", [{"mask": np.arange(6) < 4}, {"kv_lens": 4}, {"causal": True, "q_offset": 1}])
def test_garbage_in_a_bias_at_an_excluded_key_stays_out(exclude):
    """pytorch/pytorch#101967: the added number may be the garbage."""
    q, k, v = qkv(3, 6)
    for garbage in GARBAGE:
        bias = rnd(3, 6, seed=3)
        bias[:, 4:] = garbage
        out, _ = check(q, k, v, bias=bias, **exclude)
        assert np.isfinite(out).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n_queries", [4, 40])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": np.arange(45) % 5 > 0}, {"softcap": 3.0}], ids=str)
def test_nan_at_an_attended_position_shows(options, n_queries, dtype):
    """pytorch/pytorch#141128: in the row, key or value column it belongs to, and nowhere else."""
    for row in (0, 1, n_queries - 1):
        q, k, v = qkv(n_queries, 45, dtype)
        q[0, 1, row, 2] = np.nan
        out, lse = check(q, k, v, **options)
        nan = np.isnan(out.astype(np.float64))
        assert nan[0, 1, row].all()
        assert nan.sum() == nan[0, 1, row].size
        assert np.isnan(lse[0, 1, row])
    for key in (1, 22, 44):
        q, k, v = qkv(n_queries, 45, dtype)
        k[0, 1, key, 0] = np.nan
        out, _ = check(q, k, v, **options)
        assert np.isnan(out[0, 2:, -1].astype(np.float64)).all()
        assert np.isfinite(out[0, :2].astype(np.float64)).all()
        q, k, v = qkv(n_queries, 45, dtype)
        v[0, 0, key, 3] = np.nan
        out, lse = check(q, k, v, **options)
        nan = np.isnan(out.astype(np.float64))
        assert nan[0, :2, -1, 3].all()
        assert not nan[..., [0, 1, 2, 4, 5, 6]].any()
        assert np.isfinite(lse).all()


@pytest.mark.parametrize("n_queries", QUERIES)
def test_nan_shows_even_where_its_weight_underflows(n_queries):
    """pytorch/pytorch#141128: weight 0 by rounding is not exclusion."""
    bias = np.zeros(45, np.float32)
    bias[7] = -1e4
    q, k, v = qkv(n_queries, 45)
    v[:, :, 7] = np.nan
    assert np.isnan(check(q, k, v, bias=bias)[0]).all()
    q, k, v = qkv(n_queries, 45)
    k[:, :, 7] = np.nan
    assert np.isnan(check(q, k, v, bias=bias)[0]).all()
    q, k, v = qkv(n_queries, 45)
    bias[7] = np.nan
    assert np.isnan(check(q, k, v, bias=bias)[0]).all()
    assert np.isnan(check(q, k, v, mask=bias)[0]).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n_queries", QUERIES)
def test_infinite_scores_by_arithmetic_are_nan(n_queries, dtype):
    """pytorch/pytorch#141128: inf - inf is NaN as in NumPy, not a zero row; an attended infinite value is infinite."""
    q, k, v = qkv(n_queries, 21, dtype)
    q, k = np.abs(q) + dtype(1), np.abs(k) + dtype(1)
    for infinity in (np.inf, -np.inf):
        bad = k.copy()
        bad[:, :, 20, 0] = infinity
        check(q, bad, v)
        check(q, k, v, bias=np.where(np.arange(21) == 3, np.inf, 0.0))
        bad[...] = infinity
        assert np.isnan(check(q, bad, v)[0].astype(np.float64)).all()
        bad = v.copy()
        bad[:, :, 20, 2] = infinity
        assert (check(q, k, bad)[0][..., 2] == infinity).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("batch", "n_heads"), [(0, 0), (0, 4), (2, 0), (2, 4)])
def test_any_axis_may_be_empty(batch, n_heads, dtype):
    """pytorch/pytorch#141218, #174939 and #191325; Dao-AILab/flash-attention#2470; numpy/numpy#14550"""
    for n_queries, n_keys, head_dim, value_dim in itertools.product((0, 3), (0, 5), (0, 8), (0, 6)):
        q, k, v = qkv(n_queries, n_keys, dtype, n_heads=n_heads, n_kv_heads=n_heads // 2, head_dim=head_dim,
                      value_dim=value_dim, batch=batch)  # fmt: skip
        full, per_head = (batch, n_heads, n_queries, n_keys), np.ones(n_heads)
        for options in (
            {},
            {"causal": True, "window": (1, 0)},
            {"mask": np.ones(full, bool), "bias": np.zeros(full, np.float32), "softcap": 2.0},
            {"kv_lens": np.full(batch, n_keys), "q_offset": 0, "sinks": per_head, "alibi_slopes": per_head},
        ):
            out, lse = check(q, k, v, **options)
            assert out.shape == (*full[:3], value_dim)
            assert lse.shape == full[:3]
            assert n_keys or not out.astype(bool).any()
        if batch:
            packed = [x[0].swapaxes(0, 1) for x in (q, k, v)]
            out, lse = attention_varlen(*packed, [0, n_queries], [0, n_keys], return_lse=True)
            assert_attention_close((out.swapaxes(0, 1), lse.T), q[0], k[0], v[0], return_lse=True)


def test_no_features_is_the_mean_and_no_kv_heads_is_an_error():
    """pytorch/pytorch#191325: sizes that divide something."""
    v = rnd(1, 1, 5, 3)
    out, lse = check(np.zeros((1, 1, 2, 0), np.float32), np.zeros((1, 1, 5, 0), np.float32), v)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(2, keepdims=True), out.shape), atol=1e-6)
    np.testing.assert_allclose(lse, np.log(5), rtol=1e-6)
    q, k, v = qkv(3, 5)
    with pytest.raises(ValueError, match="at least one head"):
        attention(q, k[:, :0], v[:, :0])


def empty_rows(n_queries, n_keys):
    """Yield options under which some queries see nothing, first, middle and last rows of a block among them."""
    rows = np.arange(n_queries)
    keep = np.broadcast_to((rows % 4 > 0) & (rows != n_queries - 1), (n_keys, n_queries)).T
    yield {"mask": keep}
    yield {"mask": additive(keep)}
    yield {"bias": additive(keep, np.float64)}
    yield {"mask": keep, "bias": additive(np.broadcast_to(rows % 3 > 0, (n_keys, n_queries)).T)}
    yield {"causal": True}
    yield {"causal": True, "q_offset": -n_queries + 2}
    yield {"causal": True, "mask": np.arange(n_keys) > n_keys // 2}
    yield {"window": (1, 1), "q_offset": -3}
    yield {"window": (0, 0), "q_offset": n_keys - 2}
    yield {"window": (1, 1), "mask": np.arange(n_keys) % 5 == 0}
    yield {"kv_lens": 0}
    yield {"kv_lens": [0], "causal": True}
    yield {"kv_lens": 1, "mask": np.arange(n_keys) > 0}
    yield {"kv_lens": 2, "causal": True}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 9), (6, 4), (40, 19), (40, 70)])
def test_rows_that_see_nothing(n_queries, n_keys, dtype):
    """pytorch/pytorch#103749, #103963, #163997 and #134650; openvinotoolkit/openvino#35959;
    flashinfer-ai/flashinfer#4452; NVIDIA/TensorRT-LLM#17477"""
    q, k, v = qkv(n_queries, n_keys, dtype)
    n_empty = 0
    for options in empty_rows(n_queries, n_keys):
        out, lse = check(q, k, v, **options)
        empty = np.isneginf(lse)
        assert not out[empty].astype(bool).any()
        assert np.isfinite(out.astype(np.float64)).all()
        assert np.isfinite(lse[~empty]).all()
        n_empty += empty.any()
        if not options.keys() <= {"mask", "bias"}:
            continue
        # the law for merging parts holds, empty or not
        cut = n_keys // 2
        parts = [
            attention(q, k[:, :, part], v[:, :, part], return_lse=True, **{n: x[:, part] for n, x in options.items()})
            for part in (slice(cut), slice(cut, None))
        ]
        merged = merge_states([part[0] for part in parts], [part[1] for part in parts])
        np.testing.assert_allclose(merged[1], lse, rtol=1e-5, atol=1e-6)
        tolerance = 4e-2 if dtype in HALVES else 1e-5
        np.testing.assert_allclose(merged[0].astype(np.float64), out.astype(np.float64), atol=tolerance)
    assert n_empty > 5


@pytest.mark.parametrize("num_threads", [1, 8])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 130), (3, 130), (40, 130), (1, 3000), (2, 0)])
def test_sinks_count_once_per_query_head(n_queries, n_keys, num_threads):
    """modular/modular#6198, Dao-AILab/flash-attention#2752, PaddlePaddle/PaddleFleet#1439, ROCm/rocm-libraries#12229"""
    sinks = np.array([-np.inf, 0.0, 3.0, 1000.0], np.float32)
    for dtype in FLOATS:
        q, k, v = qkv(n_queries, n_keys, dtype)
        for options in ({}, {"causal": True}, {"mask": np.zeros(n_keys, bool)}, {"kv_lens": 0}, {"softcap": 1.0}):
            out, lse = check(q, k, v, sinks=sinks, num_threads=num_threads, **options)
            assert not np.isnan(lse).any()
            assert np.isfinite(out.astype(np.float64)).all()
            if "mask" in options or "kv_lens" in options or n_keys == 0:
                assert not out.astype(bool).any()
                np.testing.assert_array_equal(lse, np.broadcast_to(sinks[None, :, None], lse.shape))
            if n_keys:
                np.testing.assert_allclose(lse[0, 3], 1000)
        if n_keys:  # equal scores: the share of the keys is known
            out, _ = attention(q * 0, k, np.ones_like(v), sinks=sinks, return_lse=True, num_threads=num_threads)
            share = n_keys / (n_keys + np.exp(np.minimum(sinks.astype(np.float64), 700)))
            share = np.broadcast_to(share[None, :, None, None], out.shape)
            np.testing.assert_allclose(out.astype(np.float64), share, atol=4e-3 if dtype in HALVES else 1e-6)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("query_dtype", ["same", np.float32])
@pytest.mark.parametrize("n_queries", [1, 9])
def test_scores_of_half_types_do_not_overflow(n_queries, query_dtype, dtype):
    """philipturner/metal-flash-attention#8, pytorch/pytorch#119131, mlc-ai/mlc-llm#1870, NVIDIA/TensorRT-LLM#18044"""
    q = np.full((1, 1, n_queries, 64), 100, dtype if query_dtype == "same" else query_dtype)
    k = np.full((1, 1, 3, 64), 99, dtype)
    k[0, 0, 1] = 100
    v = rnd(1, 1, 3, 64, dtype=dtype, seed=2)
    out, lse = attention(q, k, v, return_lse=True)  # every score is above 65504, even after scaling
    np.testing.assert_array_equal(out[0, 0, 0].astype(dtype), v[0, 0, 1])
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, 80000, rtol=1e-6)
    for options in ({}, {"scale": 1e-4}, {"softcap": 50.0}, {"bias": np.full(3, -8e4, np.float32)}):
        for sign in (1, -1):
            signed = (sign * q).astype(q.dtype)
            assert_attention_close(attention(signed, k, v, **options), signed, k, v, **options)


@pytest.mark.parametrize("n_queries", [1, 9])
def test_sums_of_half_values_do_not_overflow(n_queries):
    """pytorch/pytorch#119131: 1000 values near the largest float16 have a mean, though no sum in float16."""
    q, k, v = qkv(n_queries, 1000, np.float16)
    v = (60000 + 1000 * np.abs(v.astype(np.float32)).clip(0, 5)).astype(np.float16)
    assert np.isfinite(check(q, k, v)[0]).all()


@pytest.mark.parametrize("n_queries", [1, 20])
@pytest.mark.parametrize("cap", [1e-30, 0.5, 2.0, 30.0, 1e30])
def test_softcap_saturates(cap, n_queries):
    """vllm-project/vllm#56578: exponentials inside tanh overflow"""
    k = np.zeros((1, 1, 3, 4), np.float32)
    k[0, 0, :, 0] = [1e6, 2e6, -1e6]
    q = np.zeros((1, 1, n_queries, 4), np.float32)
    q[..., 0] = 1
    v = np.eye(3, dtype=np.float32)[None, None]
    out, _ = check(q, k, v, scale=1.0, softcap=cap)
    if cap == 2.0:
        weights = np.exp([2.0, 2.0, -2.0])
        np.testing.assert_allclose(out[0, 0, 0], weights / weights.sum(), atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n_queries", QUERIES)
def test_softcap_comes_before_masks_and_biases(n_queries, dtype):
    """emmtrix/emx-onnx-cgen#731, Dao-AILab/flash-attention#1025: a capped -inf would give excluded keys weight"""
    q, k, v = qkv(n_queries, 35, dtype)
    keep = np.arange(35) % 3 > 0
    v[:, :, ~keep], v[:, :, keep] = dtype(1000), dtype(0)
    for options in ({"mask": keep}, {"mask": additive(keep)}, {"bias": additive(keep)}):
        assert not check(q, k, v, softcap=0.5, **options)[0].astype(bool).any()
    q, k, v = qkv(n_queries, 35, dtype)
    check(q, k, v, softcap=0.5, bias=20 * rnd(n_queries, 35, seed=4))  # numbers beyond the cap keep their effect
    check(q, k, v, softcap=0.5, alibi_slopes=[1, 2, 3, 4], causal=True)
    for off in (None, 0, 0.0, np.float32(0)):
        np.testing.assert_array_equal(attention(q, k, v, softcap=off), attention(q, k, v))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n_queries", QUERIES)
def test_rows_full_of_the_lowest_number_are_the_mean(n_queries, dtype):
    """pytorch/pytorch#103749 from the other side: the lowest number is a number, and keys that have it count."""
    q, k, v = qkv(n_queries, 33, dtype)
    for mask_dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        lowest = np.full((n_queries, 33), ml_dtypes.finfo(mask_dtype).min, mask_dtype)
        out, lse = check(q, k, v, mask=lowest)
        assert np.isfinite(out.astype(np.float64)).all()
        assert np.isfinite(lse).all()
    mean = np.broadcast_to(np.repeat(v.astype(np.float64).mean(2, keepdims=True), 2, axis=1), out.shape)
    lowest = np.full(33, np.finfo(np.float32 if dtype != np.float64 else np.float64).min)
    out = attention(q, k, v, mask=lowest).astype(np.float64)
    np.testing.assert_allclose(out, mean, atol=2e-2 if dtype in HALVES else 1e-5)
