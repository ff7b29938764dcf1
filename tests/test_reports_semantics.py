"""Faults of meaning that users reported of other attention libraries: masks, diagonals, windows, packing, shapes.

The reference behind each test is the public report it re-tells. Every result is judged by the oracle.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
from checker import assert_attention_close

from fastattn import attention, attention_varlen, scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("isa")

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-14, np.float16: 4e-3, ml_dtypes.bfloat16: 3e-2}


def rnd(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(n_queries, n_keys, dtype=np.float32, *, batch=1, n_heads=4, n_kv_heads=2):
    return (
        rnd(batch, n_heads, n_queries, 8, dtype=dtype),
        rnd(batch, n_kv_heads, n_keys, 8, dtype=dtype, seed=1),
        rnd(batch, n_kv_heads, n_keys, 8, dtype=dtype, seed=2),
    )


def check(q, k, v, **options):
    """Call `attention`, compare with the oracle, and return the result."""
    out = attention(q, k, v, **options)
    assert_attention_close(out, q, k, v, **options)
    return out


def assert_same(actual, expected, dtype=np.float32):
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype])


MASK_SHAPES = [(), (1,), (37,), (5, 1), (1, 37), (5, 37), (4, 1, 1), (4, 5, 37)]
MASK_SHAPES += list(itertools.product((1, 2), (1, 4), (1, 5), (1, 37)))


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_of_every_broadcastable_shape(shape):
    """pytorch/pytorch#128816 and #109607, openvinotoolkit/openvino#21217, jax-ml/jax#28974"""
    q, k, v = qkv(5, 37, batch=2)
    random = np.random.default_rng(7)
    for mask in (np.asarray(random.random(shape) > 0.3), np.asarray(random.standard_normal(shape), np.float32)):
        dense = np.ascontiguousarray(np.broadcast_to(mask, (2, 4, 5, 37)))
        out = check(q, k, v, mask=mask)
        np.testing.assert_array_equal(out, attention(q, k, v, mask=dense))
        alone = attention(q[1, 3:], k[1, 1:], v[1, 1:], mask=dense[1, 3])
        assert_same(out[1, 3], alone[0])
        if mask.dtype != bool:
            np.testing.assert_array_equal(check(q, k, v, bias=mask), out)
        one_query = check(q[:, :, :1], k, v, mask=mask if len(shape) < 2 else mask[..., :1, :])
        assert_same(one_query, out[:, :, :1])


def mask_views(dense):
    """Yield views equal to `dense` (B, H, N, S) in other memory: permuted, reversed, sliced, on odd addresses."""
    yield dense.transpose(3, 0, 2, 1).copy().transpose(1, 3, 2, 0)
    yield np.asfortranarray(dense)
    yield dense[:, ::-1, ::-1, ::-1].copy()[:, ::-1, ::-1, ::-1]
    wide = np.zeros((*dense.shape[:-1], 3 * dense.shape[-1] + 1), dense.dtype)
    wide[..., 1::3] = dense
    yield wide[..., 1::3]
    bytes_ = np.zeros(dense.nbytes + 1, np.uint8)
    odd = bytes_[1:].view(dense.dtype).reshape(dense.shape)
    odd[...] = dense
    yield odd


@pytest.mark.parametrize("mask_dtype", [bool, *FLOATS])
@pytest.mark.parametrize("n_queries", [1, 5, 40])
def test_masks_of_every_stride(n_queries, mask_dtype):
    """pytorch/pytorch#128816: the same numbers in any memory give the same result."""
    q, k, v = qkv(n_queries, 37, batch=2)
    random = np.random.default_rng(7)
    dense = random.random((2, 4, n_queries, 37)) > 0.3
    if mask_dtype is not bool:
        dense = np.where(dense, random.standard_normal(dense.shape), -np.inf).astype(mask_dtype)
    want = check(q, k, v, mask=dense)
    for view in mask_views(dense):
        np.testing.assert_array_equal(attention(q, k, v, mask=view), want)
    row = dense[1, 1, 0]
    for stretched in (np.broadcast_to(row, dense.shape), row[::-1].copy()[::-1]):
        assert_same(attention(q, k, v, mask=stretched), check(q, k, v, mask=row.copy()))


@pytest.mark.parametrize(
    "shape", [(38,), (36,), (0,), (5, 36), (6, 1), (3, 1, 1), (2, 5, 37), (3, 1, 1, 1), (2, 4, 1, 5), (1, 2, 4, 5, 37)]
)
def test_masks_that_do_not_broadcast(shape, isa):
    """pytorch/pytorch#128816: refused, never read past the end; nothing is written."""
    q, k, v = qkv(5, 37, batch=2)
    out = np.full(q.shape, 7, np.float32)
    for mask in (np.ones(shape, bool), np.zeros(shape, np.float32)):
        with pytest.raises(ValueError, match="mask must broadcast"):
            attention(q, k, v, mask=mask, out=out)
    with pytest.raises(ValueError, match="bias must broadcast"):
        attention(q, k, v, bias=np.zeros(shape), out=out)
    assert (out == 7).all()
    attention(q, k, v, out=out)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 9, 16])
def test_chunked_causal_attention_is_the_whole(chunk, dtype):
    """pytorch/pytorch#144858, #108108 and #103082; ml-explore/mlx#2835 and #2967; microsoft/onnxruntime#29020 and
    #28904; Dao-AILab/flash-attention#1778"""
    q, k, v = qkv(23, 23, dtype, batch=2)
    whole = check(q, k, v, causal=True)
    for start in range(0, 23, chunk):
        stop = min(start + chunk, 23)
        part = check(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], causal=True)
        assert_same(part, whole[:, :, start:stop], dtype)
        part = check(q[:, :, start:stop], k, v, causal=True, q_offset=start)
        assert_same(part, whole[:, :, start:stop], dtype)
        part = check(q[:, :, start:stop], k, v, causal=True, kv_lens=stop)
        assert_same(part, whole[:, :, start:stop], dtype)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (1, 40), (3, 7), (7, 3), (40, 40), (40, 70), (70, 40)])
def test_causal_diagonal_ends_at_the_last_key(n_queries, n_keys):
    """pytorch/pytorch#108108: the same rule for N < S, N = S and N > S, for every entry, and in packed form."""
    q, k, v = qkv(n_queries, n_keys, batch=2)
    i, j = np.ogrid[:n_queries, :n_keys]
    out = check(q, k, v, causal=True)
    assert_same(out, check(q, k, v, mask=j <= i + n_keys - n_queries))
    assert_same(out[:, :, -1:], check(q[:, :, -1:], k, v))
    packed = attention_varlen(
        *(x.swapaxes(1, 2).reshape(-1, *x.shape[1::2]) for x in (q, k, v)),
        [0, n_queries, 2 * n_queries], [0, n_keys, 2 * n_keys], causal=True,
    )  # fmt: skip
    assert_same(packed.reshape(2, n_queries, 4, 8).swapaxes(1, 2), out)
    lengths = [n_keys, max(n_keys - 2, 0)]
    ragged = check(q, k, v, causal=True, kv_lens=lengths)
    for entry, length in enumerate(lengths):
        own = [x[entry : entry + 1] for x in (q, k[:, :, :length], v[:, :, :length])]
        assert_same(ragged[entry], check(*own, causal=True)[0])
    start_aligned = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert_same(start_aligned, check(q, k, v, mask=j <= i))
    offsets = [3 - n_queries, n_keys]
    assert_same(check(q, k, v, causal=True, q_offset=offsets)[0], check(q, k, v, mask=j <= i + 3 - n_queries)[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1), "softcap": 2.0}], ids=str)
def test_packed_members_equal_their_own_calls(options, dtype):
    """Dao-AILab/flash-attention#1537, #1619, #1713 and #1661; pytorch/pytorch#176793"""
    cases = [
        ([0, 0, 1, 1, 4], [0, 3, 3, 3, 8]),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([0], [0]),
        ([0, 0, 0, 5, 5, 45], [0, 40, 40, 41, 41, 100]),
        ([0, 0, 0, 0, 0, 0, 2], [0, 0, 0, 1, 1, 1, 1]),
    ]
    for bounds_q, bounds_k in cases:
        q = rnd(bounds_q[-1], 6, 8, dtype=dtype)
        k, v = (rnd(bounds_k[-1], 2, 8, dtype=dtype, seed=seed) for seed in (1, 2))
        sinks, slopes = rnd(6, seed=3), np.abs(rnd(6, seed=4))
        for extra in ({}, {"sinks": sinks, "alibi_slopes": slopes}):
            both = {**options, **extra}
            out, lse = attention_varlen(q, k, v, bounds_q, bounds_k, return_lse=True, **both)
            assert out.shape == q.shape
            assert lse.shape == q.shape[:2]
            for (q0, q1), (k0, k1) in zip(itertools.pairwise(bounds_q), itertools.pairwise(bounds_k), strict=True):
                member = [x.swapaxes(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
                result = (out[q0:q1].swapaxes(0, 1), lse[q0:q1].T)
                assert_attention_close(result, *member, return_lse=True, **both)
                np.testing.assert_array_equal(attention(*member, **both), result[0])
            for kind in (np.int32, np.uint64, np.int16, tuple):
                bounds = (kind(bounds_q), kind(bounds_k)) if kind is tuple else np.array([bounds_q, bounds_k], kind)
                np.testing.assert_array_equal(attention_varlen(q, k, v, *bounds, **both), out)


@pytest.mark.parametrize("bounds", [[0, 3], [0, 9], [1, 8], [0, 5, 4, 8], [0, -1, 8], [], [[0, 8]], [8, 0], 8])
def test_packed_boundaries_that_do_not_cover_the_tokens(bounds, isa):
    """Dao-AILab/flash-attention#1619: rows outside of every member have no answer, so the call is refused."""
    q, k, v = (rnd(8, 2, 4, seed=seed) for seed in range(3))
    out = np.full(q.shape, 7, np.float32)
    for arguments in ((bounds,), (bounds, [0, 8]), ([0, 8], bounds)):
        with pytest.raises((ValueError, TypeError), match="cu_seqlens"):
            attention_varlen(q, k, v, *arguments, out=out)
    with pytest.raises(TypeError, match="cu_seqlens_q must be integers"):
        attention_varlen(q, k, v, [0.0, 8.0])
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        attention_varlen(q, k, v, [0, 4, 8], [0, 8], out=out)
    assert (out == 7).all()
    attention_varlen(q, k, v, [0, 8], out=out)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 9), (9, 9), (40, 33), (33, 70)])
def test_exclusions_intersect(n_queries, n_keys, dtype):
    """microsoft/onnxruntime#14363, huggingface/candle#3632, facebookresearch/xformers#103, nari-labs/dia#170"""
    q, k, v = qkv(n_queries, n_keys, dtype, batch=2)
    i, j = np.ogrid[:n_queries, :n_keys]
    distance = i + n_keys - n_queries - j
    padding, bias = j >= 4, rnd(n_queries, n_keys, seed=5)
    exclusions = {
        "mask": (padding, padding),
        "bias": (np.where(j % 3 > 0, 0, -np.inf), j % 3 > 0),
        "causal": (True, distance >= 0),
        "window": ((5, 2), (distance <= 5) & (distance >= -2)),
        "kv_lens": (n_keys - 2, j < n_keys - 2),
    }
    for size in (2, 3, 5):
        for names in itertools.combinations(exclusions, size):
            options = {name: exclusions[name][0] for name in names} | {"q_offset": n_keys - n_queries}
            keep = np.logical_and.reduce([np.broadcast_to(exclusions[name][1], bias.shape) for name in names])
            out = check(q, k, v, **options)
            assert_same(out, check(q, k, v, mask=keep), dtype)
            assert not out[:, :, ~keep.any(axis=1)].astype(bool).any()
    float_mask = np.where(distance >= 0, bias, -np.inf)
    assert_same(check(q, k, v, mask=bias, causal=True), check(q, k, v, mask=float_mask), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mask_dtype", FLOATS)
def test_float_masks_of_any_dtype(mask_dtype, dtype):
    """pytorch/pytorch#99012, mlfoundations/open_clip#484, Comfy-Org/ComfyUI#8118, jax-ml/jax#34114"""
    q, k, v = qkv(3, 3, dtype)
    v = np.abs(v) + dtype(1)  # 0 is outside the hull of the values
    mask = np.zeros((3, 3))
    mask[0] = -1e9 if mask_dtype != np.float16 else -65504
    mask[1, 1:] = -60000.0
    out = attention(q, k, v, mask=mask.astype(mask_dtype))
    assert out.dtype == np.dtype(dtype)
    values = np.repeat(v, 2, axis=1)
    assert (out[:, :, 0] >= values.min(2)).all()
    assert (out[:, :, 0] <= values.max(2)).all()
    np.testing.assert_array_equal(out[:, :, 1], values[:, :, 0])
    for n_queries in (1, 9, 40):
        q, k, v = qkv(n_queries, 37, dtype)
        check(q, k, v, mask=rnd(n_queries, 37, dtype=mask_dtype), bias=rnd(4, n_queries, 37, dtype=mask_dtype, seed=8))
        shift = np.full((n_queries, 37), -1000, mask_dtype)  # the same for all keys: no effect
        unshifted = attention(q, k, v).astype(np.float64)
        tolerance = 2e-4 if dtype in (np.float32, np.float64) else TOLERANCE[dtype]
        np.testing.assert_allclose(attention(q, k, v, mask=shift).astype(np.float64), unshifted, atol=tolerance)


@pytest.mark.parametrize("n_queries", [1, 2, 40])
def test_bool_masks_select_and_integers_are_refused(n_queries):
    """huggingface/diffusers#14342, huggingface/transformers#41443, openvinotoolkit/openvino#31630, Ascend/pytorch#88"""
    q, k, v = qkv(n_queries, 6)
    mask = np.array([1, 0, 1, 1, 0, 0], bool)
    want = attention(q, k[:, :, mask], v[:, :, mask])
    odd_bytes = np.array([1, 0, 2, 255, 0, 0], np.uint8).view(bool)
    for given in (mask, odd_bytes, mask.tolist(), np.broadcast_to(odd_bytes, (n_queries, 6)), mask[None]):
        assert_same(attention(q, k, v, mask=given), want)
    out = np.full(q.shape, 7, np.float32)
    for dtype in (np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, complex, object, "U1"):
        with pytest.raises(TypeError, match="use bool for keep/drop, float to add"):
            attention(q, k, v, mask=mask.astype(dtype), out=out)
    with pytest.raises(TypeError, match="bias must be float"):
        attention(q, k, v, bias=mask, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("n_queries", [67, 20, 1])
def test_windows_count_inclusive_distances(n_queries):
    """huggingface/transformers#39408, Dao-AILab/flash-attention#1133, ml-explore/mlx#3552, zml/zml#763,
    apple/axlearn#1009"""
    n_keys = 67
    q, k, v = qkv(n_queries, n_keys, n_kv_heads=4)
    distance = np.arange(n_queries)[:, None] + n_keys - n_queries - np.arange(n_keys)
    causal = attention(q, k, v, causal=True)
    np.testing.assert_array_equal(attention(q, k, v, window=(0, 0)), v[:, :, n_keys - n_queries :])
    for side in (66, 67, 72, 10**18, -1, None):
        assert_same(check(q, k, v, window=(side, 0)), causal)
    for side in (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66):
        for window, keep in (
            ((side, 0), (distance <= side) & (distance >= 0)),
            ((side, -1), distance <= side),
            ((None, side), distance >= -side),
            ((side, side), np.abs(distance) <= side),
        ):
            assert_same(check(q, k, v, window=window), attention(q, k, v, mask=keep))
            assert_same(check(q, k, v, window=window, causal=True), attention(q, k, v, mask=keep & (distance >= 0)))
    last = check(q[:, :, -1:], k, v, window=(4, 0))
    assert_same(last, attention(q[:, :, -1:], k[:, :, -5:], v[:, :, -5:]))
    for bare in (4, np.int64(4), True, "44"):
        with pytest.raises(TypeError, match="window"):
            attention(q, k, v, window=bare)
    for wrong in ((4,), (1, 2, 3), (-2, 0), (0, -7)):
        with pytest.raises(ValueError, match="window"):
            attention(q, k, v, window=wrong)


def test_inconsistent_shapes_are_refused(isa):
    """pytorch/pytorch#193728 and #176767, microsoft/onnxruntime#28358: before any memory is read or written."""
    q = rnd(2, 4, 3, 8)
    out = np.full(q.shape, 7, np.float32)
    for k_shape, v_shape in [
        ((2, 2, 5, 8), (2, 2, 6, 8)), ((2, 2, 6, 8), (2, 2, 5, 8)), ((2, 2, 5, 7), (2, 2, 5, 8)),
        ((3, 2, 5, 8), (3, 2, 5, 8)), ((2, 2, 5, 8), (3, 2, 5, 8)), ((2, 2, 5, 8), (2, 1, 5, 8)),
        ((2, 3, 5, 8), (2, 3, 5, 8)), ((2, 8, 5, 8), (2, 8, 5, 8)), ((2, 0, 5, 8), (2, 0, 5, 8)),
        ((2, 2, 5, 9), (2, 2, 5, 9)), ((5,), (5, 8)), ((), ()), ((5, 8), (6, 8)), ((2, 2, 1, 8), (2, 2, 5, 8)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=r"\b[kqv]\b.*got"):
            attention(q, rnd(*k_shape), rnd(*v_shape), out=out)
    k, v = rnd(2, 2, 5, 8), rnd(2, 2, 5, 8)
    for dtypes in itertools.product(FLOATS, repeat=3):
        legal = dtypes[1] == dtypes[2] and (
            dtypes[0] == dtypes[1] or (dtypes[0] == np.float32 and np.dtype(dtypes[1]).itemsize == 2)
        )
        arrays = [x.astype(dtype) for x, dtype in zip((q, k, v), dtypes, strict=True)]
        if legal:
            check(*arrays)
        else:
            with pytest.raises(TypeError, match="same dtype"):
                attention(*arrays, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("value_dim", [1, 3, 8, 24, 130])
@pytest.mark.parametrize("n_queries", [1, 3, 40])
def test_value_dim_may_differ(n_queries, value_dim):
    """pytorch/pytorch#128348: the result takes its width from v, the scale from q and k."""
    for dtype in FLOATS:
        q, k, _ = qkv(n_queries, 35, dtype)
        v = rnd(1, 2, 35, value_dim, dtype=dtype, seed=2)
        out = check(q, k, v)
        assert out.shape == (1, 4, n_queries, value_dim)
        np.testing.assert_array_equal(check(q, k, v, scale=8**-0.5), out)
