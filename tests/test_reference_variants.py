"""The oracle's other functions: other layouts, packed batches, merging, and attention without a softmax."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from fastattn import reference

NAN, INF = math.nan, math.inf
Q = [[1, 0, 0, 1], [0, 1, 1, 0]]
V = [[1, 2, 3, 4], [5, 6, 7, 8]]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-13, atol=1e-14)


# Multi-head attention


def test_worked_example():
    out = reference.multi_head_attention(Q, Q, V, 2)
    lines = ["[" + " ".join(f"{x:.4f}" for x in row) + "]" for row in out]
    assert lines == ["[2.3210 3.3210 4.3210 5.3210]", "[3.6790 4.6790 5.6790 6.6790]"]


def test_worked_example_in_closed_form():
    """Each head scores 1/sqrt(2) on its own key and 0 on the other."""
    own = math.exp(1 / math.sqrt(2)) / (1 + math.exp(1 / math.sqrt(2)))
    v = np.array(V, float)
    close(reference.multi_head_attention(Q, Q, V, 2), [own * v[0] + (1 - own) * v[1], own * v[1] + (1 - own) * v[0]])


@pytest.mark.parametrize("options", [{}, {"causal": True, "sinks": [0.1, 0.2, 0.3, 0.4]}, {"kv_lens": [2, 0, 5]}])
@pytest.mark.parametrize("num_kv_heads", [None, 4, 2, 1])
def test_heads_are_groups_of_neighbouring_columns(num_kv_heads, options):
    kv = num_kv_heads or 4
    q, k, v = normal(3, 2, 4 * 6), normal(3, 5, kv * 6, seed=1), normal(3, 5, kv * 3, seed=2)
    out, lse = reference.multi_head_attention(q, k, v, 4, num_kv_heads=num_kv_heads, return_lse=True, **options)
    assert (out.shape, lse.shape) == ((3, 2, 12), (3, 4, 2))
    for h in range(4):
        g = h // (4 // kv)
        columns = q[..., 6 * h : 6 * h + 6], k[..., 6 * g : 6 * g + 6], v[..., 3 * g : 3 * g + 3]
        one_head = {**options, "sinks": options["sinks"][h : h + 1]} if "sinks" in options else options
        expected, expected_lse = reference.attention(*(x[:, None] for x in columns), return_lse=True, **one_head)
        close(out[..., 3 * h : 3 * h + 3], expected[:, 0])
        close(lse[:, h], expected_lse[:, 0])


def test_multi_head_attention_of_nothing_and_in_float32():
    assert reference.multi_head_attention(np.ones((0, 4)), np.ones((3, 4)), np.ones((3, 6)), 2).shape == (0, 6)
    assert not reference.multi_head_attention(np.ones((2, 4)), np.ones((0, 4)), np.ones((0, 6)), 2).any()
    assert reference.multi_head_attention(Q, Q, V, 2, dtype=np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="reshape"):
        reference.multi_head_attention(Q, Q, V, 3)


# PyTorch's signature


def test_causal_starts_at_the_first_key():
    weights = reference.scaled_dot_product_attention(
        np.zeros((3, 1)), np.zeros((5, 1)), np.eye(5), is_causal=True, scale=2.0
    )
    close(weights, [[1, 0, 0, 0, 0], [1 / 2, 1 / 2, 0, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0, 0]])


@pytest.mark.parametrize("mask", [None, np.array([[True, False, True]]), np.array([0.0, -INF, 2.0])])
def test_pytorch_signature_is_attention_otherwise(mask):
    q, k, v = normal(2, 4, 5, 3), normal(2, 4, 3, 3, seed=1), normal(2, 4, 3, 2, seed=2)
    expected = reference.attention(q, k, v, mask=mask, scale=0.7)
    out = reference.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.7)
    np.testing.assert_array_equal(out, expected)


def test_grouped_heads_need_the_flag():
    q, kv = normal(4, 5, 3), normal(2, 6, 3, seed=1)
    with pytest.raises(ValueError, match="4 query heads with 2 key/value heads need enable_gqa=True"):
        reference.scaled_dot_product_attention(q, kv, kv)
    grouped = reference.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)
    np.testing.assert_array_equal(grouped, reference.attention(q, kv, kv))
    one = reference.scaled_dot_product_attention(q, kv[:1], kv[:1])
    np.testing.assert_array_equal(one, reference.attention(q, kv[:1], kv[:1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p must be 0, got 0.1"),
        ({"attn_mask": np.ones((2, 2), bool), "is_causal": True}, "attn_mask must be None when is_causal is set"),
    ],
)
def test_what_pytorch_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        reference.scaled_dot_product_attention(np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 1)), **options)


# Packed batches


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, list])
@pytest.mark.parametrize("options", [{}, {"causal": True, "alibi_slopes": [0.5, 0.1], "sinks": [0, 1]}])
def test_each_member_of_a_packed_batch_is_its_own_call(dtype, options):
    edges_q, edges_k = [0, 2, 2, 5, 6], [0, 3, 4, 4, 7]
    q, k, v = normal(6, 2, 3), normal(7, 1, 3, seed=1), normal(7, 1, 4, seed=2)
    boundaries = [x if dtype is list else np.array(x, dtype) for x in (edges_q, edges_k)]
    out, lse = reference.attention_varlen(q, k, v, *boundaries, return_lse=True, **options)
    assert (out.shape, lse.shape) == ((6, 2, 4), (6, 2))
    for m in range(4):
        rows, keys = slice(*edges_q[m : m + 2]), slice(*edges_k[m : m + 2])
        member = [x.swapaxes(0, 1) for x in (q[rows], k[keys], v[keys])]
        expected, expected_lse = reference.attention(*member, return_lse=True, **options)
        np.testing.assert_array_equal(out[rows], expected.swapaxes(0, 1))
        np.testing.assert_array_equal(lse[rows], expected_lse.T)
    assert not out[2:5].any()  # a member with queries and no keys


def test_packed_keys_default_to_the_boundaries_of_the_queries():
    q = normal(5, 2, 3)
    both = reference.attention_varlen(q, q, q, [0, 1, 5], [0, 1, 5], causal=True)
    np.testing.assert_array_equal(reference.attention_varlen(q, q, q, [0, 1, 5], causal=True), both)
    assert reference.attention_varlen(q[:0], q[:0], q[:0], [0, 0]).shape == (0, 2, 3)
    assert reference.attention_varlen(q, q, q, [0, 5], dtype=np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="zip"):
        reference.attention_varlen(q, q, q, [0, 1, 5], [0, 5])


# Merging


@pytest.mark.parametrize("cuts", [[3], [0, 3], [1, 2, 6], [2, 2, 7]])
def test_merged_parts_are_the_whole(cuts):
    q, k, v = normal(2, 3, 4, 5), normal(2, 3, 7, 5, seed=1), normal(2, 3, 7, 2, seed=2)
    mask = np.random.default_rng(3).random((2, 1, 4, 7)) < 0.5
    mask[1, 0, 2] = False  # a row that is empty in every part
    edges = [0, *cuts, 7]
    parts = [
        reference.attention(q, k[:, :, a:b], v[:, :, a:b], mask=mask[..., a:b], return_lse=True)
        for a, b in itertools.pairwise(edges)
    ]
    merged = reference.merge_states(*zip(*parts, strict=True))
    for actual, expected in zip(merged, reference.attention(q, k, v, mask=mask, return_lse=True), strict=True):
        close(actual, expected)
    np.testing.assert_array_equal(merged[0][1, :, 2], np.zeros((3, 2)))
    np.testing.assert_array_equal(merged[1][1, :, 2], np.full(3, -INF))


def test_states_without_keys_count_for_nothing():
    out, lse = reference.merge_states([[1.0, 2.0], [NAN, INF]], [0.25, -INF])
    assert (out.tolist(), lse.item()) == ([1.0, 2.0], 0.25)
    out, lse = reference.merge_states([[NAN, 2.0]], [-INF])
    assert (out.tolist(), lse.item()) == ([0.0, 0.0], -INF)
    out, lse = reference.merge_states([[1.0, 2.0], [NAN, 4.0]], [1000.0, -1000.0])
    np.testing.assert_array_equal(out, [NAN, 2.0])
    assert lse.item() == 1000.0


def test_merging_large_and_float32_states():
    out, lse = reference.merge_states([[[4.0]], [[8.0]]], [[1e4], [1e4 + math.log(3)]])
    np.testing.assert_allclose(out, [[7.0]], rtol=1e-11)
    np.testing.assert_allclose(lse, [1e4 + math.log(4)], rtol=1e-15)
    results = reference.merge_states(np.ones((2, 3, 4)), np.ones((2, 3)), dtype=np.float32)
    assert [x.dtype for x in results] == [np.float32] * 2
    with pytest.raises(ValueError, match="stack"):
        reference.merge_states([], [])


# Without a softmax


def loop_linear(q, k, v, causal, scale):
    """One (H, N, D), (K, S, D), (K, S, E) entry in scalar loops."""
    (n_heads, n_queries, head_dim), (n_kv_heads, n_keys, value_dim) = q.shape, v.shape
    out = np.zeros((n_heads, n_queries, value_dim))
    for h, i, e in np.ndindex(out.shape):
        g = h * n_kv_heads // n_heads
        seen = [j for j in range(n_keys) if not causal or j <= i + n_keys - n_queries]
        out[h, i, e] = scale * math.fsum(q[h, i, d] * k[g, j, d] * v[g, j, e] for j in seen for d in range(head_dim))
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_queries", [1, 3, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_linear_attention_against_loops(causal, n_queries, kv_heads):
    q, k, v = normal(4, n_queries, 3), normal(kv_heads, 4, 3, seed=1), normal(kv_heads, 4, 2, seed=2)
    for scale in (1.0, -0.5, 0.0):
        out = reference.linear_attention(q, k, v, causal=causal, scale=scale)
        close(out, loop_linear(q, k, v, causal, scale))
    close(reference.linear_attention(q[0], k[0], v[0], causal=causal), loop_linear(q, k, v, causal, 1.0)[0])


def test_linear_attention_keeps_future_and_finite_columns_clean():
    q, k, v = normal(1, 4, 3), normal(1, 4, 3, seed=1), normal(1, 4, 2, seed=2)
    clean = reference.linear_attention(q, k, v, causal=True)
    v[0, 2, 1] = NAN
    k[0, 3, 0] = INF
    out = reference.linear_attention(q, k, v, causal=True)
    np.testing.assert_array_equal(out[0, :2], clean[0, :2])
    assert out[0, 2, 0] == clean[0, 2, 0]
    assert np.isnan(out[0, 2:, 1]).all()
    assert np.isinf(out[0, 3, 0])


def test_linear_attention_broadcasts_and_converts():
    q, k, v = normal(2, 1, 4, 3, 2), normal(5, 2, 6, 2, seed=1), normal(2, 6, 1, seed=2)
    out = reference.linear_attention(q, k, v)
    assert out.shape == (2, 5, 4, 3, 1)
    close(out[1, 3], loop_linear(q[1, 0], k[3], v, False, 1.0))
    half = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    assert reference.linear_attention(*half).dtype == np.float64
    assert reference.linear_attention(q, k, v, scale=np.float64(2), dtype=np.float32).dtype == np.float32
    assert not reference.linear_attention(np.ones((3, 0)), np.ones((2, 0)), np.ones((2, 1))).any()
    assert reference.linear_attention(np.ones((3, 2)), np.ones((0, 2)), np.ones((0, 1))).tolist() == [[0.0]] * 3
    with pytest.raises(ValueError, match="divide the 4 query heads, got 3"):
        reference.linear_attention(np.ones((4, 1, 1)), np.ones((3, 1, 1)), np.ones((3, 1, 1)))


@pytest.mark.parametrize(("n", "d"), [(1, 1), (5, 2), (2, 5), (0, 3), (3, 0)])
def test_mhsa_forward_against_loops(n, d):
    x, w = normal(n, d), normal(d, 3 * d, seed=1)
    projected = [[math.fsum(x[i, c] * w[c, m] for c in range(d)) for m in range(3 * d)] for i in range(n)]
    expected = np.array(x)
    for i, e in np.ndindex(n, d):
        for j in range(n):
            score = math.fsum(projected[i][c] * projected[j][d + c] for c in range(d))
            expected[i, e] += score * projected[j][2 * d + e]
    np.testing.assert_allclose(reference.mhsa_forward(x, w), expected, rtol=1e-12, atol=1e-12)


def test_mhsa_forward_batches_and_converts():
    x, w = normal(2, 3, 4, 2), normal(2, 6, seed=1)
    out = reference.mhsa_forward(x, w)
    for entry in np.ndindex(2, 3):
        close(out[entry], reference.mhsa_forward(x[entry], w))
    assert reference.mhsa_forward([[1], [2]], [[1, 2, 3]]).tolist() == [[31.0], [62.0]]
    assert reference.mhsa_forward(x.astype(np.float16), w.astype(np.float16)).dtype == np.float64
    assert reference.mhsa_forward(x, w, dtype=np.float32).dtype == np.float32
