"""int8 keys and values: what quantizing loses, and attention on codes against the oracle on their numbers."""

import inspect
import itertools

import numpy as np
import pytest
from checker import assert_attention_close
from inputs import BFLOAT16, normal
from problems import OPTIONS, draw_problem
from test_hostile import every_side, fence, linux_only, sizes
from test_layouts import LAYOUTS

from fastattn import attention
from fastattn._quantized import quantize_rows, quantized_attention

__all__ = ["fence"]  # a fixture

FLOATS = [np.float32, np.float64, np.float16, BFLOAT16]
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


def numbers(codes, scales):
    """The numbers that codes stand for, exactly: products of 8 and 24 bits."""
    return codes * scales[..., None].astype(np.float64)


def quantized(*shape, seed=0):
    """Codes and scales of seeded rows whose magnitudes differ tenfold, every ninth row of zeros."""
    rows = normal(*shape, seed=seed) * 10 ** -np.random.default_rng(seed).random((*shape[:-1], 1))
    rows.reshape(-1, max(1, shape[-1]))[4::9] = 0
    return quantize_rows(rows.astype(np.float32))


def problem(lead=(2,), heads=4, kv_heads=2, n_queries=1, n_keys=37, head_dim=16, value_dim=16, seed=0):
    q = normal(*lead, heads, n_queries, head_dim, seed=seed)
    keys = quantized(*lead, kv_heads, n_keys, head_dim, seed=seed + 1)
    return q, keys, quantized(*lead, kv_heads, n_keys, value_dim, seed=seed + 2)


def check(q, keys, values, **options):
    result = quantized_attention(q, *keys, *values, **options)
    assert_attention_close(result, q, numbers(*keys), numbers(*values), **options)


# ---- quantize_rows


@pytest.mark.parametrize("size", [1e-30, 0.01, 1.0, 1e4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_element_is_off_by_half_a_step_at_most(dtype, size):
    x = (normal(3, 500, 33, dtype=np.float64) * size).astype(dtype)
    codes, scales = quantize_rows(x)
    assert codes.dtype == np.int8
    assert codes.shape == x.shape
    assert scales.dtype == np.float32
    assert scales.shape == x.shape[:-1]
    exact = x.astype(np.float64)
    largest = np.abs(exact).max(axis=-1, keepdims=True)
    error = np.abs(numbers(codes, scales) - exact)
    assert (error <= largest * (1 / 254 + 1e-7)).all()
    if largest.all():  # float16 has nothing as small as 1e-30
        assert (np.abs(codes.astype(int)).max(axis=-1) == 127).all()
        assert (error > largest / 255).any()  # the bound is not slack


def test_multiples_of_a_step_are_exact():
    x = np.array([[-127, 0, 1, 126], [0, 0, 0, 0], [-0.0, 63.5, -1, 0.5]]) * [[0.25], [1], [2]]
    codes, scales = quantize_rows(x)
    assert codes.tolist() == [[-127, 0, 1, 126], [0, 0, 0, 0], [0, 127, -2, 1]]
    assert scales.tolist() == [0.25, 0, 1]


def test_quantizing_is_symmetric_and_looks_at_one_row_only():
    x = normal(4, 6, 10)
    codes, scales = quantize_rows(x)
    minus, same = quantize_rows(-x)
    assert np.array_equal(minus, -codes)
    assert np.array_equal(same, scales)
    alone = quantize_rows(x[2, 3])
    assert np.array_equal(alone[0], codes[2, 3])
    assert alone[1] == scales[2, 3]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 5)])
def test_empty_rows_have_scale_0(shape):
    codes, scales = quantize_rows(np.ones(shape))
    assert codes.shape == shape
    assert np.array_equal(scales, np.zeros(shape[:-1]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_smallest_and_the_largest_numbers(dtype):
    factors = np.array([1, -0.3, 0.77, 0.5])
    for size in (1e-36, 1e-38, 1e-40, 1e-43, SMALLEST, 3.4e38):
        x = (factors * size).astype(dtype)
        codes, scale = quantize_rows(x)
        assert (np.abs(numbers(codes, scale) - x) <= scale.astype(np.float64) * (0.5 + 1e-5)).all()
        assert scale <= max(np.abs(x).max() / 127 * (1 + 1e-7), np.abs(x).max() / 127 + SMALLEST)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([[1.0, np.nan]], ValueError, "x must be finite .* got nan"),
        ([[1.0, -np.inf]], ValueError, "x must be finite .* got -inf"),
        ([[1.0, 1e39]], ValueError, "x must be .* within float32's range .* got 1e\\+39"),
        (np.ones((2, 2), np.int8), TypeError, "x must be float32, float64, float16 or bfloat16, got int8"),
        (np.ones((2, 2), complex), TypeError, "x must be float32, .* got complex128"),
        (1.5, TypeError, "x must have rows"),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_name(x, error, message):
    with pytest.raises(error, match=message):
        quantize_rows(x)


# ---- quantized_attention


def test_options_are_those_of_attention():
    ours, public = (
        {name: p.default for name, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}
        for f in (quantized_attention, attention)
    )
    assert ours == public


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n_queries", [1, 2, 7, 40])
def test_sizes(n_queries, group, isa):
    rng = np.random.default_rng([n_queries, group])
    for turn in range(12):
        n_keys = int(rng.choice([1, 2, 7, 8, 9, 63, 64, 65, 130, 300, 1030]))
        head_dim, value_dim = (int(rng.choice([1, 3, 4, 8, 9, 15, 16, 33, 64, 70, 130])) for _ in range(2))
        args = problem((), 2 * group, 2, n_queries, n_keys, head_dim, value_dim, seed=turn)
        check(*args, causal=bool(turn % 2), return_lse=turn % 3 == 0)


@pytest.mark.parametrize("n_queries", [1, 3, 40])
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(OPTIONS, 2)))
def test_pairs_of_options(first, second, n_queries, isa):
    q, k, v, options = draw_problem({first, second}, "float32", seed=1, n_queries=n_queries, n_keys=72, value_dim=20)
    check(q, quantize_rows(k), quantize_rows(v), **options)


@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 100])
@pytest.mark.parametrize("n_queries", [1, 12])
def test_pages(page_size, n_queries, isa):
    n_pages = -(-200 // page_size)
    keys, values = (quantized(2 * n_pages + 1, 2, page_size, 24, seed=i) for i in range(2))
    table = np.random.default_rng(page_size).permutation(2 * n_pages + 1)[: 2 * n_pages].reshape(2, n_pages)
    q = normal(2, 4, n_queries, 24)
    check(q, keys, values, block_table=table, kv_lens=[200, 77], causal=True, return_lse=True)


@pytest.mark.parametrize("n_queries", [1, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, n_queries, isa):
    q, keys, values = problem((2,), 3, 3, n_queries, 21, 10, 12)
    # Scales have no feature axis: give them one, lay it out and take it away again.
    changed = [(LAYOUTS[layout](c), LAYOUTS[layout](np.repeat(s[..., None], 2, -1))[..., 0]) for c, s in (keys, values)]
    result = quantized_attention(LAYOUTS[layout](q), *changed[0], *changed[1])
    assert_attention_close(result, q, numbers(*keys), numbers(*values))


@pytest.mark.parametrize("n_queries", [1, 20])
def test_leading_axes(n_queries, isa):
    """None, broadcast ones, and ones that are not one axis in memory."""
    check(*problem((), 4, 2, n_queries))
    q, keys, values = problem((3, 2), 4, 2, n_queries)
    check(q, keys, values, kv_lens=[[1, 2], [3, 37], [5, 0]])
    check(q, [x[:1, :1] for x in keys], [x[0] for x in values], return_lse=True)
    check(q.swapaxes(0, 1), *([x.swapaxes(0, 1) for x in pair] for pair in (keys, values)))
    check(q[0, 0, 0], [x[0, 0, 0] for x in keys], [x[0, 0, 0] for x in values])


def test_sizes_of_0(isa):
    for sizes_of in ({"n_keys": 0}, {"head_dim": 0}, {"value_dim": 0}, {"n_queries": 0}, {"lead": (0,)}):
        check(*problem(**sizes_of), return_lse=True)


@pytest.mark.parametrize("n_queries", [1, 20])
def test_results_do_not_depend_on_threads_or_company(n_queries, isa):
    q, keys, values = problem((3,), 4, 2, n_queries, 2500, 40, 24)
    one = quantized_attention(q, *keys, *values, num_threads=1)
    assert np.array_equal(one, quantized_attention(q, *keys, *values, num_threads=4))
    alone = quantized_attention(q[1:2, 2:], *(x[1:2, 1:] for x in (*keys, *values)), num_threads=3)
    assert np.array_equal(one[1:2, 2:], alone)


@pytest.mark.parametrize("n_queries", [1, 20])
def test_scales_of_excluded_keys_may_be_anything(n_queries, isa):
    q, keys, values = problem((), 2, 2, n_queries, 150)
    keep = np.random.default_rng(4).random((2, n_queries, 150)) < 0.6
    keep[..., 40:50] = False
    expected = quantized_attention(q, *keys, *values, mask=keep, kv_lens=140)
    for garbage in (np.nan, np.inf, 3e38):
        for _, scales in (keys, values):
            scales[:, 40:50] = scales[:, 140:] = garbage
        assert np.array_equal(quantized_attention(q, *keys, *values, mask=keep, kv_lens=140), expected)
        added = quantized_attention(q, *keys, *values, mask=np.where(keep, 0.0, -np.inf), kv_lens=140)
        np.testing.assert_allclose(added, expected, rtol=1e-5, atol=1e-5)


def test_one_key_returns_its_value_row_exactly(isa):
    codes, scales = quantized(1, 50, 24, seed=3)
    out = quantized_attention(normal(1, 1, 24), codes, scales, codes, scales, window=(0, 0), q_offset=17)
    assert np.array_equal(out[0, 0], codes[0, 17] * scales[0, 17])


@pytest.mark.parametrize("n_queries", [1, 20])
def test_the_loss_against_unquantized_arrays(n_queries, isa):
    """A mean of values is off by half a step, whatever the weights; scores by what the docstring says."""
    q, k, v = normal(2, n_queries, 64), normal(2, 500, 64, seed=1), normal(2, 500, 64, seed=2)
    largest = np.abs(v).max()
    out = quantized_attention(q, *quantize_rows(k), *quantize_rows(v), scale=0.0)
    error = np.abs(out - attention(q, k, v, scale=0.0)).max()
    assert 0 < error <= largest / 254 + 1e-6
    _, exact = attention(q, k, v, return_lse=True)
    _, lse = quantized_attention(q, *quantize_rows(k), *quantize_rows(v), return_lse=True)
    moved = np.abs(lse - exact)
    assert moved.max() > 0
    assert (moved <= np.abs(q).sum(-1) * np.abs(k).max() / 254 / 8 + 1e-5).all()


@linux_only
@every_side
def test_nothing_beside_the_arrays_is_touched(isa, fence):
    for turn, (n_queries, n_keys, dim, value_dim, kv_heads, group) in enumerate(sizes(5, 60)):
        q, keys, values = problem((), kv_heads * group, kv_heads, n_queries, n_keys, dim, value_dim, seed=turn)
        fenced = [fence.put(x) for x in (q, *keys, *values)]
        out = fence.put(np.full((*q.shape[:-1], value_dim), 7, np.float32), writable=True)
        quantized_attention(*fenced, out=out, causal=turn % 2 == 0)
        assert_attention_close(out, q, numbers(*keys), numbers(*values), causal=turn % 2 == 0)


@linux_only
def test_keys_beyond_the_lengths_are_not_read(isa, fence):
    for n_queries in (1, 20):
        q, keys, values = problem((), 1, 1, n_queries, 9000, 64, 64)
        short = [x[:, :100] for x in (*keys, *values)]
        fenced = [fence.put(x, hide_bytes_after=x[:, :100].nbytes) for x in (*keys, *values)]
        out = quantized_attention(q, *fenced, kv_lens=100)
        assert np.array_equal(out, quantized_attention(q, *short, q_offset=100 - n_queries, kv_lens=100))


# ---- errors

GOOD_Q = np.ones((2, 3, 8), np.float32)
GOOD = np.ones((2, 5, 8), np.int8)
SCALES = np.ones((2, 5), np.float32)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((GOOD_Q.astype(np.float64), GOOD, SCALES, GOOD, SCALES), TypeError, "^q must be float32 .* got float64"),
        ((GOOD_Q, GOOD.view(np.uint8), SCALES, GOOD, SCALES), TypeError, "^k must be int8 codes, got uint8"),
        ((GOOD_Q, GOOD, SCALES, GOOD.astype(np.float32), SCALES), TypeError, "^v must be int8 codes, got float32"),
        ((GOOD_Q, GOOD, SCALES.astype(np.float64), GOOD, SCALES), TypeError, "^k_scales must be float32, got float64"),
        (
            (GOOD_Q, GOOD, SCALES, GOOD, SCALES[:, :4]),
            ValueError,
            r"^v_scales must have shape \(2, 5\), one per row of v, got \(2, 4\)",
        ),
        ((GOOD_Q, GOOD[..., :7], SCALES, GOOD, SCALES), ValueError, r"^k must have shape \(\.\.\., 2, 5, 8\)"),
        ((GOOD_Q, GOOD, SCALES, GOOD[:1], SCALES[:1]), ValueError, "same number of heads, got 2 and 1"),
    ],
)
def test_wrong_arrays_are_refused_by_name(given, error, message):
    with pytest.raises(error, match=message):
        quantized_attention(*given)


def test_out_must_not_overlap_scales():
    scales = np.ones((2, 5), np.float32)
    with pytest.raises(ValueError, match="out must not overlap an input, got memory that v_scales uses"):
        quantized_attention(GOOD_Q[:, :1], GOOD, SCALES, GOOD[..., :5], scales, out=scales[:, None])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_attention_refuses_codes_without_scales_by_name(dtype):
    q = GOOD_Q.astype(dtype)
    with pytest.raises(
        TypeError, match=r"k and v must have the same dtype .*got float\d\d, int8 .*as float64.* and int8"
    ):
        attention(q, GOOD, GOOD)
