"""`attention` against the oracle at awkward sizes, on every level and in every dtype."""

import numpy as np
import pytest
from checker import assert_attention_close
from inputs import DTYPES, normal, qkv

from fastattn import attention

pytestmark = pytest.mark.usefixtures("isa")

LENGTHS = ["1", "2", "3", "W-1", "W", "W+1", "3W", "8W+2"]
HEAD_DIMS = [1, 2, 3, 7, 8, 31, 32, 36, 64, 65, 80, 128]
GROUPS = [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (4, 2), (8, 2), (6, 3), (16, 2), (8, 8)]
BLOCK_EDGES = [95, 96, 97, 191, 192, 193, 256, 257, 385]

every_dtype = pytest.mark.parametrize("dtypes", DTYPES)


def check(q, k, v, **options):
    assert_attention_close(attention(q, k, v, **options), q, k, v, **options)


def resolve(length, kernel, dtypes):
    """A length in terms of W, the numbers in a vector of the computing type."""
    width = kernel.vector_bits // (64 if dtypes == "float64" else 32)
    return {
        "W-1": width - 1, "W": width, "W+1": width + 1, "3W": 3 * width, "8W+2": 8 * width + 2,
    }.get(length) or int(length)  # fmt: skip


@every_dtype
@pytest.mark.parametrize("shift", [0, 1, 3, 6])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_around_the_vector_width(isa, dtypes, length, shift):
    other = LENGTHS[(LENGTHS.index(length) + shift) % len(LENGTHS)]
    n_queries, n_keys = (resolve(name, isa, dtypes) for name in (length, other))
    check(*qkv(1, 2, 1, n_queries, n_keys, 8, dtypes=dtypes), return_lse=True)


@every_dtype
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dims(dtypes, dim):
    check(*qkv(1, 2, 2, 5, 37, dim, dtypes=dtypes), return_lse=True)


@every_dtype
@pytest.mark.parametrize(("dim", "value_dim"), [*zip(HEAD_DIMS, HEAD_DIMS[::-1], strict=True), (8, 9), (64, 1)])
def test_value_dim_differs(dtypes, dim, value_dim):
    check(*qkv(1, 2, 2, 9, 21, dim, value_dim, dtypes=dtypes))


@pytest.mark.parametrize("value_dim", [1, 3, 8, 24, 130])
def test_default_scale_is_that_of_the_head_dim(value_dim):
    q, k, v = qkv(value_dim=value_dim)
    assert np.array_equal(attention(q, k, v), attention(q, k, v, scale=8**-0.5))


@pytest.mark.parametrize("dtypes", ["float32", "float64", "float16"])
@pytest.mark.parametrize("n_queries", [1, 3, 17])
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_grouped_heads(dtypes, heads, kv_heads, n_queries):
    check(*qkv(1, heads, kv_heads, n_queries, 19, 8, dtypes=dtypes), causal=True, return_lse=True)


@every_dtype
@pytest.mark.parametrize("n_keys", BLOCK_EDGES)
def test_edges_of_key_blocks(dtypes, n_keys):
    q, k, v = qkv(1, 2, 1, 7, n_keys, 16, dtypes=dtypes)
    for options in ({}, {"causal": True}, {"window": (40, 0)}):
        check(q, k, v, **options, return_lse=True)


@pytest.mark.parametrize("dtypes", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("n", [97, 200])
def test_self_attention_over_several_blocks(dtypes, n):
    q, k, v = qkv(1, 1, 1, n, n, 8, dtypes=dtypes)
    for options in ({}, {"causal": True}, {"window": (3, 5)}):
        check(q, k, v, **options)


@every_dtype
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("n_keys", [1, 2, 3, 9, 100, 1000, 5000])
def test_decoding_one_query(dtypes, heads, n_keys):
    check(*qkv(2, heads, 1, 1, n_keys, 16, dtypes=dtypes), causal=True, num_threads=8, return_lse=True)


@pytest.mark.parametrize("place", ["first", "last", "none", "both ends"])
@pytest.mark.parametrize("n_keys", [1, 2, 3, 4, 5, 6, 7, 8, 9, 1000, 20_000])
def test_decoding_with_few_visible_keys(n_keys, place):
    mask = np.zeros(n_keys, bool)
    mask[{"first": [0], "last": [-1], "none": [], "both ends": [0, -1]}[place]] = True
    q, k, v = qkv(1, 2, 1, 1, n_keys, 16)
    check(q, k, v, mask=mask, num_threads=8, return_lse=True)
    split, serial = (attention(q, k, v, mask=mask, num_threads=threads) for threads in (8, 1))
    assert np.array_equal(split, serial)


@every_dtype
def test_many_keys_do_not_drift(dtypes):
    check(*qkv(1, 1, 1, 2, 16_384, 8, dtypes=dtypes), return_lse=True)


@every_dtype
def test_values_with_a_large_mean(dtypes):
    q, k, v = qkv(1, 1, 1, 3, 3000, 8, dtypes=dtypes)
    check(q, k, (v + v.dtype.type(100)).astype(v.dtype))


@pytest.mark.parametrize(
    ("q_lead", "k_lead", "v_lead"),
    [
        ((), (), ()), ((3,), (3,), (3,)), ((2, 3), (2, 3), (2, 3)), ((2, 1, 3), (2, 1, 3), (2, 1, 3)),
        ((3,), (1,), (3,)), ((1,), (3,), (3,)), ((3,), (), ()), ((), (3,), (3,)), ((), (), (3,)),
        ((2, 1), (1, 3), (3,)), ((1, 3), (2, 1), ()), ((2, 3), (1, 1), (3,)),
    ],
)  # fmt: skip
def test_leading_axes_broadcast(q_lead, k_lead, v_lead):
    q, k, v = normal(*q_lead, 4, 5, 8), normal(*k_lead, 2, 7, 8, seed=1), normal(*v_lead, 2, 7, 3, seed=2)
    check(q, k, v, return_lse=True)
    check(q, k, v, causal=True)


@every_dtype
def test_one_head_and_many_without_batch(dtypes):
    q, k, v = qkv(1, 4, 2, 5, 9, 8, dtypes=dtypes)
    check(q[0], k[0], v[0], return_lse=True)
    check(q[0, 0], k[0, 0], v[0, 0], return_lse=True)
    check(q[0], k[0, 0], v[0, 0], return_lse=True)
    check(q[0, 0], k[0, :1], v[0, :1], return_lse=True)


def five_axis_views(x):
    """The same (2, 3, heads, rows, features) numbers in layouts whose leading axes are not one axis in memory."""
    yield np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)
    yield np.ascontiguousarray(np.moveaxis(x, 2, 0)).transpose(1, 2, 0, 3, 4)
    large = np.zeros((2, 6, *x.shape[2:]), x.dtype)
    large[:, ::2] = x
    yield large[:, ::2]
    yield np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]


@every_dtype
def test_leading_axes_that_do_not_collapse(dtypes):
    q, k, v = (x.reshape(2, 3, *x.shape[1:]) for x in qkv(6, 4, 2, 5, 9, 8, dtypes=dtypes))
    options = {
        "kv_lens": np.array([[9, 3, 0], [1, 8, 5]]),
        "q_offset": np.array([[4, 1, 0], [3, 2, 9]]),
        "alibi_slopes": normal(2, 3, 4),
        "mask": normal(3, 1, 5, 9) > -1,
        "bias": normal(2, 1, 4, 1, 9),
    }
    for arrays in zip(five_axis_views(q), five_axis_views(k), five_axis_views(v), strict=True):
        check(*arrays)
        check(*arrays, **options, causal=True, return_lse=True)


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        (zeros(0, 2, 3, 4), zeros(0, 2, 5, 4), zeros(0, 2, 5, 6)),
        (zeros(0, 2, 3, 4), zeros(1, 2, 5, 4), zeros(2, 5, 6)),
        (zeros(2, 0, 3, 4), zeros(2, 0, 5, 4), zeros(2, 0, 5, 6)),
        (zeros(2, 0, 3, 4), zeros(2, 3, 5, 4), zeros(2, 3, 5, 6)),
        (zeros(2, 2, 0, 4), zeros(2, 2, 5, 4), zeros(2, 2, 5, 6)),
        (zeros(2, 4, 3, 4), zeros(2, 2, 0, 4), zeros(2, 2, 0, 6)),
        (normal(2, 2, 3, 0), normal(2, 2, 5, 0), normal(2, 2, 5, 6)),
        (normal(2, 2, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 0)),
        (zeros(0, 0, 0, 0), zeros(0, 0, 0, 0), zeros(0, 0, 0, 0)),
        (zeros(2, 2, 0, 0), zeros(2, 2, 0, 0), zeros(2, 2, 0, 0)),
        (zeros(2, 0, 3, 2, 4), zeros(2, 0, 1, 5, 4), zeros(2, 0, 1, 5, 4)),
        (zeros(0, 4), zeros(5, 4), zeros(5, 6)),
        (zeros(3, 4), zeros(0, 4), zeros(0, 6)),
    ],
    ids=lambda x: "x".join(map(str, x.shape)),
)
@pytest.mark.parametrize("dtypes", ["float32", "float64", "float32-bfloat16"])
def test_zero_sizes(q, k, v, dtypes):
    q, k, v = q.astype(DTYPES[dtypes][0]), k.astype(DTYPES[dtypes][1]), v.astype(DTYPES[dtypes][1])
    check(q, k, v)
    for options in ({}, {"causal": True, "num_threads": 3}):
        out, lse = attention(q, k, v, **options, return_lse=True)
        assert_attention_close((out, lse), q, k, v, **options, return_lse=True)
        if k.shape[-2] == 0:
            assert not out.any()
            assert np.isneginf(lse).all()


@pytest.mark.parametrize("n_keys", [0, 5])
@pytest.mark.parametrize("n_queries", [0, 3])
def test_zero_sizes_with_every_option(n_queries, n_keys):
    q, k, v = qkv(2, 4, 2, n_queries, n_keys)
    mask, bias = np.ones((n_queries, n_keys), bool), normal(4, n_queries, n_keys)
    check(
        q, k, v, mask=mask, bias=bias, causal=True, window=(2, 0), q_offset=1, kv_lens=[n_keys, 0], softcap=3.0,
        alibi_slopes=np.ones(4), sinks=np.zeros(4), return_lse=True,
    )  # fmt: skip


def test_without_head_dim_the_result_is_the_mean():
    v = normal(2, 2, 5, 3)
    out = attention(np.zeros((2, 2, 4, 0), np.float32), np.zeros((2, 2, 5, 0), np.float32), v)
    assert np.allclose(out, v.mean(axis=2, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("kind", [list, np.int64, np.uint8, np.bool_])
def test_integers_and_lists_become_float64(kind):
    arrays = [(x * 10).astype(np.int64) % 3 for x in qkv(1, 2, 1, 5, 9, 8)]
    arrays = [x.tolist() if kind is list else x.astype(kind) for x in arrays]
    check(*arrays, return_lse=True)


def test_arrays_come_by_place_or_by_name():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 4), np.float32)
    expected = attention(q, k, v)
    for result in (attention(v=v, k=k, q=q), attention(q, v=v, k=k), attention(q, k, v=v)):
        np.testing.assert_array_equal(result, expected)
