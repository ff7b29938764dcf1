"""Blocks of a mask that hide all, nothing or some, of every kind and layout; and sums beyond the type's range."""

import numpy as np
import pytest
from checker import assert_attention_close
from inputs import normal, qkv

from fastattn import attention

pytestmark = pytest.mark.usefixtures("isa")

N, S = 40, 300  # several panels and blocks, with tails


def visible(content, n_keys=S):
    """(N, n_keys): which keys a mask of this content leaves."""
    numbers = np.random.default_rng([3, n_keys]).random((N, n_keys))
    some = numbers > 0.4
    return {
        "all": np.ones((N, n_keys), bool),
        "none": np.zeros((N, n_keys), bool),
        "some": some,
        "one key": numbers == numbers.max(axis=1, keepdims=True),
        "all but one": np.arange(n_keys) + np.arange(N)[:, None] != n_keys,
        "blocks": np.where(np.arange(n_keys) // 256 == 1, some, np.arange(n_keys) < 256),
        "rows": np.broadcast_to(np.arange(N)[:, None] % 17 != 3, (N, n_keys)),
    }[content]


LAYOUTS = {
    "contiguous": lambda mask: mask,
    "transposed": lambda mask: np.ascontiguousarray(mask.T).T,
    "every second": lambda mask: np.repeat(mask, 2, axis=1)[:, ::2],
    "backwards": lambda mask: np.ascontiguousarray(mask[:, ::-1])[:, ::-1],
    "rows apart": lambda mask: np.pad(mask, ((0, 0), (3, 5)))[:, 3 : 3 + mask.shape[1]],
    "by heads": lambda mask: np.stack([mask, mask[::-1]]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("content", ["all", "none", "some", "one key", "all but one", "blocks", "rows"])
@pytest.mark.parametrize("dtypes", ["float32", "float64"])
def test_contents_and_layouts(dtypes, content, layout):
    q, k, v = qkv(1, 2, 1, N, S, 12, dtypes=dtypes)
    mask = LAYOUTS[layout](visible(content))
    added = np.where(mask, 0, -np.inf).astype(np.float32)
    for options in ({}, {"softcap": 2.0, "window": (150, 40)}):
        for same in (mask, added):
            assert_attention_close(attention(q, k, v, mask=same, **options), q, k, v, mask=mask, **options)
    check = {"mask": mask, "bias": normal(N, S), "alibi_slopes": [0.01, 0.0], "return_lse": True}
    assert_attention_close(attention(q, k, v, **check), q, k, v, **check)


@pytest.mark.parametrize("n_keys", [1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 257])
@pytest.mark.parametrize("dtypes", ["float32", "float64"])
def test_every_tail_of_a_boolean_mask(dtypes, n_keys):
    q, k, v = qkv(1, 2, 2, N, n_keys, 5, dtypes=dtypes)
    for content in ("some", "all but one"):
        mask = visible(content, n_keys)
        assert_attention_close(attention(q, k, v, mask=mask, return_lse=True), q, k, v, mask=mask, return_lse=True)


@pytest.mark.parametrize("n_keys", [1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 63, 255, 257])
@pytest.mark.parametrize("dtypes", ["float32", "float64"])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_every_tail_of_a_float_mask(dtypes, n_keys, name):
    q, k, v = qkv(1, 2, 2, N, n_keys, 5, dtypes=dtypes)
    added = normal(N, n_keys, dtype=q.dtype)
    for options in ({name: added}, {name: np.where(visible("all but one", n_keys), added, -np.inf).astype(q.dtype)}):
        assert_attention_close(attention(q, k, v, **options, return_lse=True), q, k, v, **options, return_lse=True)


def test_every_byte_but_zero_is_true():
    q, k, v = qkv(1, 2, 2, N, S)
    mask = visible("some")
    values = np.random.default_rng(0).integers(1, 256, mask.shape).astype(np.uint8)
    odd = np.where(mask, values, 0).astype(np.uint8).view(np.bool_)
    assert np.array_equal(attention(q, k, v, mask=odd), attention(q, k, v, mask=mask))


@pytest.mark.parametrize("size", [1e29, 1e31, 3e38])
@pytest.mark.parametrize("dtypes", ["float32", "float64"])
def test_biases_of_any_size(dtypes, size):
    q, k, v = qkv(1, 2, 1, N, S, 8, dtypes=dtypes)
    bias = np.zeros((N, S), np.float32)
    bias[:, 1::3] = -size
    bias[::2, 5] = -np.inf
    check = {"bias": bias, "return_lse": True}
    assert_attention_close(attention(q, k, v, **check), q, k, v, **check)
    bias[:, 7] = size
    assert_attention_close(attention(q, k, v, bias=bias), q, k, v, bias=bias)


@pytest.mark.parametrize("n_queries", [1, 3, 40])
@pytest.mark.parametrize("dtypes", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sinks": [0.5, -1.0]}, {"mask": np.arange(3000) % 5 > 0}])
def test_sums_beyond_the_range_of_their_type(dtypes, n_queries, options):
    """Weights are divided by their total at the end: the sums before that are larger than any value."""
    q, k, v = qkv(1, 2, 1, n_queries, 3000, 8, dtypes=dtypes)
    largest = np.finfo(v.dtype).max / v.dtype.type(1.001)
    v[...] = largest * np.array([1, -1, 0.5, 1e-3, 1e-30, 0, 1, 0.9], v.dtype)
    v[:, :, ::2, 6] = -largest
    result = attention(q, k, v, **options)
    assert np.isfinite(result).all()
    share = 1.0
    if "sinks" in options:
        _, lse = attention(q, k, v, return_lse=True)
        share = 1 / (1 + np.exp(np.asarray(options["sinks"]).reshape(1, 2, 1) - lse))[..., None]
    expected = np.broadcast_to(v[0, 0, 1, :6] * share, result[..., :6].shape)
    np.testing.assert_allclose(result[..., :6], expected, rtol=2e-6)
    many = np.array([attention(q, k, v, num_threads=threads, **options) for threads in (1, 2, 3)])
    assert np.array_equal(many[0], many[1])
    assert np.array_equal(many[0], many[2])


@pytest.mark.parametrize("n_queries", [2, 40])
def test_a_row_in_need_of_care_leaves_the_others_bit_for_bit(n_queries):
    q, k, v = qkv(1, 2, 1, n_queries, 700)
    expected = attention(q, k, v, causal=True)
    wrong = q.copy()
    wrong[0, 1, 1] = np.nan
    result = attention(wrong, k, v, causal=True)
    assert np.isnan(result[0, 1, 1]).all()
    result[0, 1, 1] = expected[0, 1, 1]
    assert np.array_equal(result, expected)
