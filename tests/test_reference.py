"""The oracle against a second, independent implementation: Python loops over scalars, no arrays."""

import inspect
import math

import ml_dtypes
import numpy as np
import pytest

from fastattn import reference

NAN, INF = math.nan, math.inf
SHAPES = [(1, 1, 4, 4, 3, 2), (4, 2, 3, 5, 2, 3), (6, 1, 5, 3, 1, 1), (2, 2, 1, 7, 4, 4), (3, 3, 4, 1, 2, 2)]


def loop_attention(q, k, v, *, mask=None, bias=None, causal=False, window=(None, None), q_offset=None, kv_len=None,
                   scale=None, softcap=None, alibi_slopes=None, sinks=None):  # fmt: skip
    """One (H, N, D), (K, S, D), (K, S, E) entry; mask and bias are full (H, N, S). Returns nested lists."""
    n_heads, n_queries, head_dim = q.shape
    n_kv_heads, n_keys, value_dim = v.shape
    length = n_keys if kv_len is None else kv_len
    offset = length - n_queries if q_offset is None else q_offset
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    left, right = (INF if side in (None, -1) else side for side in window)
    out, lse = [], []
    for h in range(n_heads):
        kv_head = h * n_kv_heads // n_heads
        for i in range(n_queries):
            scores = {}
            for j in range(length):
                ahead = j - (i + offset)
                if (causal and ahead > 0) or ahead > right or -ahead > left:
                    continue
                score = scale * math.fsum(float(q[h, i, d]) * float(k[kv_head, j, d]) for d in range(head_dim))
                if softcap:
                    score = softcap * math.tanh(score / softcap)
                if alibi_slopes is not None:
                    score -= alibi_slopes[h] * abs(ahead)
                added = [float(x[h, i, j]) for x in (bias, mask) if x is not None and x.dtype != bool]
                if -INF in added or (mask is not None and mask.dtype == bool and not mask[h, i, j]):
                    continue
                scores[j] = math.fsum([score, *added])
            logits = list(scores.values()) + ([] if sinks is None else [float(sinks[h])])
            top = max(logits, default=0.0)
            total = math.fsum(math.exp(x - top) for x in logits)
            lse.append(top + math.log(total) if logits else -INF)
            for e in range(value_dim):
                terms = [math.exp(s - top) / total * float(v[kv_head, j, e]) for j, s in scores.items()]
                out.append(math.fsum(terms))
    return np.reshape(out, (n_heads, n_queries, value_dim)), np.reshape(lse, (n_heads, n_queries))


def inputs(shape, lead=(), seed=0):
    h, kv, n, s, d, e = shape
    rng = np.random.default_rng(seed)
    sizes = ((h, n, d), (kv, s, d), (kv, s, e))
    return [rng.standard_normal((*lead, *size)) for size in sizes]


def check_against_loops(shape, **options):
    """Compare both implementations on one entry whose masks are already (H, N, S)."""
    q, k, v = inputs(shape)
    kv_len = options.pop("kv_lens", None)
    out, lse = reference.attention(q, k, v, return_lse=True, kv_lens=kv_len, **options)
    loop_out, loop_lse = loop_attention(q, k, v, kv_len=kv_len, **options)
    np.testing.assert_allclose(out, loop_out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, loop_lse, rtol=1e-13, atol=1e-14)
    assert out.dtype == lse.dtype == np.float64


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (1, 0)},
        {"window": (0, 2)},
        {"window": (-1, 1)},
        {"window": (2, None)},
        {"window": (0, 0)},
        {"window": (1, 1), "causal": True},
        {"q_offset": 0, "causal": True},
        {"q_offset": 2, "causal": True},
        {"q_offset": -2, "causal": True, "window": (1, 5)},
        {"q_offset": 100, "window": (98, 0)},
        {"kv_lens": 1},
        {"kv_lens": 0},
        {"kv_lens": 1, "causal": True},
        {"kv_lens": 1, "causal": True, "q_offset": 1},
        {"scale": 0.0},
        {"scale": -2.5},
        {"softcap": 0.7},
        {"softcap": 0},
    ],
)
def test_options_without_arrays(shape, options):
    check_against_loops(shape, **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_options_with_arrays(shape, causal):
    h, _, n, s, _, _ = shape
    rng = np.random.default_rng(1)
    bool_mask = rng.random((h, n, s)) < 0.5
    float_mask = np.where(rng.random((h, n, s)) < 0.3, -INF, rng.standard_normal((h, n, s)))
    slopes, sinks = rng.random(h), rng.standard_normal(h)
    for options in (
        {"mask": bool_mask},
        {"mask": float_mask},
        {"bias": float_mask},
        {"mask": bool_mask, "bias": float_mask},
        {"mask": float_mask, "bias": rng.standard_normal((h, n, s))},
        {"alibi_slopes": slopes},
        {"alibi_slopes": slopes, "q_offset": 3},
        {"alibi_slopes": slopes, "kv_lens": 1},
        {"sinks": sinks},
        {"sinks": sinks, "mask": bool_mask},
        {"sinks": sinks, "mask": float_mask, "bias": float_mask, "alibi_slopes": slopes, "softcap": 1.5,
         "window": (1, 1), "kv_lens": s - 1, "scale": 0.3},
    ):  # fmt: skip
        check_against_loops(shape, causal=causal, **options)


def test_batch_entries_have_their_own_lengths_offsets_and_slopes():
    lead, shape = (2, 3), (4, 2, 3, 5, 2, 3)
    q, k, v = inputs(shape, lead)
    rng = np.random.default_rng(2)
    lengths, offsets = rng.integers(0, 6, lead), rng.integers(-3, 6, lead)
    slopes, mask = rng.random((*lead, 4)), rng.random((*lead, 4, 3, 5)) < 0.8
    options = {"causal": True, "mask": mask, "alibi_slopes": slopes}
    out = reference.attention(q, k, v, kv_lens=lengths, q_offset=offsets, **options)
    end_aligned = reference.attention(q, k, v, kv_lens=lengths.astype(np.uint8), **options)
    for entry in np.ndindex(lead):
        arrays = {"causal": True, "mask": mask[entry], "alibi_slopes": slopes[entry], "kv_len": lengths[entry]}
        expected, _ = loop_attention(q[entry], k[entry], v[entry], q_offset=offsets[entry], **arrays)
        np.testing.assert_allclose(out[entry], expected, rtol=1e-13, atol=1e-14)
        expected, _ = loop_attention(q[entry], k[entry], v[entry], **arrays)
        np.testing.assert_allclose(end_aligned[entry], expected, rtol=1e-13, atol=1e-14)


def test_leading_axes_and_masks_broadcast():
    q, k, v = inputs((4, 2, 3, 5, 2, 3), (2, 3))
    mask = np.random.default_rng(3).random((2, 1, 4, 1, 5)) < 0.7
    out, lse = reference.attention(q, k[:1], v[0, 0], mask=mask, return_lse=True)
    full = [np.broadcast_to(x, (2, 3, *x.shape[-3:])) for x in (q, k[:1], v[0, 0])]
    expected, expected_lse = reference.attention(*full, mask=np.broadcast_to(mask, (2, 3, 4, 3, 5)), return_lse=True)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    only_values = reference.attention(q[0, 0], k[0, 0], v, return_lse=True)
    assert [x.shape for x in only_values] == [(2, 3, 4, 3, 3), (2, 3, 4, 3)]


@pytest.mark.parametrize("mask", [True, False, 0.5, -INF, np.bool_(True), np.float32(2), [[True, False, True]]])
def test_small_and_scalar_masks(mask):
    q, k, v = (x[0] for x in inputs((1, 1, 4, 3, 2, 2)))
    full = np.broadcast_to(mask, (1, 4, 3))
    expected, _ = loop_attention(q[None], k[None], v[None], mask=full)
    np.testing.assert_allclose(reference.attention(q, k, v, mask=mask), expected[0], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("bad", [{"mask": 1}, {"mask": [[1, 0]]}, {"bias": True}, {"bias": np.ones((1, 2), int)}])
def test_integer_masks_and_bool_biases_are_refused(bad):
    with pytest.raises(TypeError, match="float"):
        reference.attention(np.ones((1, 2)), np.ones((2, 2)), np.ones((2, 2)), **bad)


def test_pages_equal_the_same_keys_in_order():
    rng = np.random.default_rng(4)
    n_kv_heads, page, table = 2, 3, np.array([[4, 0, 2], [1, -7, 999]])  # numbers past kv_lens are never looked at
    k_pages, v_pages = rng.standard_normal((5, n_kv_heads, page, 4)), rng.standard_normal((5, n_kv_heads, page, 2))
    q, lengths = rng.standard_normal((2, 4, 2, 4)), np.array([8, 2])
    options = {"causal": True, "mask": rng.random((2, 1, 2, 9)) < 0.8}
    out = reference.attention(q, k_pages, v_pages, block_table=table, kv_lens=lengths, **options)
    for b, used in ((0, [4, 0, 2]), (1, [1, 1, 1])):
        k, v = (np.concatenate([pages[number] for number in used], axis=1) for pages in (k_pages, v_pages))
        expected, _ = loop_attention(
            q[b], k, v, kv_len=lengths[b], causal=True, mask=np.broadcast_to(options["mask"][b], (4, 2, 9))
        )
        np.testing.assert_allclose(out[b], expected, rtol=1e-13, atol=1e-14)
    assert not reference.attention(q, k_pages[:0], v_pages[:0], block_table=table, kv_lens=[0, 0]).any()
    with pytest.raises(ValueError, match="block_table needs kv_lens"):
        reference.attention(q, k_pages, v_pages, block_table=table)


def test_values_known_by_hand():
    q, k, v = [[1.0], [1.0]], [[0.0], [math.log(3)]], [[4.0, 0.0], [8.0, 1.0]]
    out, lse = reference.attention(q, k, v, return_lse=True)  # weights 1/4 and 3/4
    np.testing.assert_allclose(out, [[7, 0.75], [7, 0.75]], rtol=1e-15)
    np.testing.assert_allclose(lse, [math.log(4)] * 2, rtol=1e-15)
    out, lse = reference.attention(q, k, v, sinks=[math.log(4)], return_lse=True)  # 1/8 and 3/8
    np.testing.assert_allclose(out, [[3.5, 0.375], [3.5, 0.375]], rtol=1e-15)
    np.testing.assert_allclose(lse, [math.log(8)] * 2, rtol=1e-15)
    out = reference.attention(q, k, v, alibi_slopes=[math.log(3)])  # distances 0 1 / 1 0: scores 0 0 / -log 3, log 3
    np.testing.assert_allclose(out, [[6, 0.5], [7.6, 0.9]], rtol=1e-15)


def test_causal_diagonal_ends_at_the_last_key():
    """The keys that 3 queries see of 5, and of 2: values one-hot, so weights can be read off."""
    for n_keys, seen in ((5, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]), (2, [[0, 0], [1, 0], [1, 1]])):
        weights = reference.attention(np.zeros((3, 2)), np.zeros((n_keys, 2)), np.eye(n_keys), causal=True)
        np.testing.assert_array_equal(weights > 0, np.array(seen, bool))
    weights = reference.attention(np.zeros((3, 2)), np.zeros((5, 2)), np.eye(5), window=(1, 0))
    np.testing.assert_array_equal(weights * 2, [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]])


@pytest.mark.parametrize("options", [{"mask": False}, {"mask": -INF}, {"bias": -INF}, {"kv_lens": 0}])
def test_empty_rows_give_zero(options):
    q, k, v = inputs((2, 1, 3, 4, 2, 2))
    q[0, 0, 0] = v[0, 0, 0] = k[0, 1, 0] = NAN
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    np.testing.assert_array_equal(out, np.zeros((2, 3, 2)))
    np.testing.assert_array_equal(lse, np.full((2, 3), -INF))
    out, lse = reference.attention(q, k, v, return_lse=True, sinks=[1.5, -INF], **options)
    np.testing.assert_array_equal(out, np.zeros((2, 3, 2)))
    np.testing.assert_array_equal(lse, [[1.5] * 3, [-INF] * 3])


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.array([True, True, False])},
        {"mask": np.array([0.0, 1.0, -INF])},
        {"bias": np.array([0.0, 1.0, -INF])},
        {"bias": np.array([0.0, 1.0, NAN]), "kv_lens": 2},
        {"bias": np.array([0.0, 1.0, INF]), "mask": np.array([0.0, 0.0, -INF])},
        {"kv_lens": 2},
        {"window": (None, 1), "q_offset": 0},
    ],
)
def test_excluded_keys_never_leak(poison, options):
    q, k, v = inputs((2, 1, 1, 3, 4, 2))
    clean_options = {**options, "bias": np.nan_to_num(options["bias"], neginf=-INF)} if "bias" in options else options
    clean = reference.attention(q, k, v, return_lse=True, **clean_options)
    k[0, 2], v[0, 2] = poison, poison
    for actual, expected in zip(reference.attention(q, k, v, return_lse=True, **options), clean, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_nan_value_shows_in_its_column_of_the_rows_that_see_it():
    q, k, v = inputs((4, 2, 4, 4, 3, 3))
    clean = reference.attention(q, k, v, causal=True)
    v[1, 2, 1] = NAN  # read by heads 2 and 3, seen by queries 2 and 3
    out = reference.attention(q, k, v, causal=True)
    spoilt = np.zeros(out.shape, bool)
    spoilt[2:, 2:, 1] = True
    np.testing.assert_array_equal(np.isnan(out), spoilt)
    np.testing.assert_array_equal(out[~spoilt], clean[~spoilt])


def test_nan_key_or_query_shows_in_every_column_of_its_rows():
    q, k, v = inputs((1, 1, 4, 4, 3, 2))
    k[0, 2, 0] = NAN
    q[0, 0, 0] = NAN
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    for result in (out[0, :, 0], out[0, :, 1], lse[0]):
        np.testing.assert_array_equal(np.isnan(result), [True, False, True, True])


def test_attended_nan_shows_although_its_weight_underflows():
    out = reference.attention([[1.0]], [[0.0], [-1e6]], [[1.0, 1.0], [NAN, 2.0]])
    np.testing.assert_array_equal(out, [[NAN, 1.0]])
    bias = np.array([[0.0, NAN]])
    np.testing.assert_array_equal(reference.attention([[1.0]], [[0.0], [1.0]], [[1.0], [2.0]], bias=bias), [[NAN]])


@pytest.mark.parametrize(("values", "expected"), [((INF, 1), INF), ((-INF, 1), -INF), ((INF, -INF), NAN)])
def test_infinite_values_follow_arithmetic(values, expected):
    v = [[values[0], 5.0], [values[1], 5.0]]
    np.testing.assert_array_equal(reference.attention([[0.0]], [[0.0], [0.0]], v), [[expected, 5.0]])


def test_infinite_scores_by_arithmetic_give_nan():
    v = [[1.0], [2.0]]
    assert np.isnan(reference.attention([[1.0]], [[INF], [0.0]], v)).all()
    assert np.isnan(reference.attention([[1.0]], [[-INF], [-INF]], v)).all()
    assert np.isnan(reference.attention([[1.0]], [[0.0], [0.0]], v, mask=np.array([INF, 0.0]))).all()
    np.testing.assert_array_equal(reference.attention([[1.0]], [[-INF], [0.0]], v), [[2.0]])
    out, lse = reference.attention([[1.0]], [[-INF], [-INF]], v, sinks=[0.5], return_lse=True)
    assert (out.item(), lse.item()) == (0.0, 0.5)  # the sink has all the weight


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("evaluate_in", [np.float32, np.float64])
def test_row_of_the_smallest_number_is_the_mean(dtype, name, evaluate_in):
    """In the type of the inputs, and beyond it: those are clamped, so that they are all alike."""
    q, k, v = (x.astype(dtype) for x in inputs((1, 1, 2, 4, 3, 2)))
    q[...] = 0
    addend = np.full((2, 4), float(ml_dtypes.finfo(dtype).min))
    mean = np.broadcast_to(v.astype(np.float64).mean(axis=1, keepdims=True), (1, 2, 2))
    tolerance = 1e-6 if evaluate_in is np.float32 else 1e-15
    out = reference.attention(q, k, v, dtype=evaluate_in, **{name: addend})
    np.testing.assert_allclose(out, mean, rtol=tolerance, atol=tolerance)
    if dtype is not np.float64 or evaluate_in is np.float32:
        beyond = np.array([[-1e300, -1e301, -1e302, np.finfo(np.float64).min]])
        out = reference.attention(q, k, v, dtype=evaluate_in, **{name: beyond})
        np.testing.assert_allclose(out, mean, rtol=tolerance, atol=tolerance)


def test_integers_have_the_range_of_float64():
    q, mask = np.zeros((1, 1), np.int8), np.array([-1e300, -2e300])
    np.testing.assert_array_equal(reference.attention(q, [[0], [0]], [[1], [3]], mask=mask), [[1.0]])
    np.testing.assert_array_equal(reference.attention(np.float32(q), [[0], [0]], [[1], [3]], mask=mask), [[2.0]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, bool])
def test_inputs_of_any_real_type_become_float64(dtype):
    q, k, v = (np.round(x * 4).astype(dtype) for x in inputs((2, 2, 3, 3, 2, 2)))
    expected = reference.attention(*(x.astype(np.float64) for x in (q, k, v)))
    for arrays in ((q, k, v), [x.tolist() for x in (q, k, v)]):
        out = reference.attention(*arrays)
        assert out.dtype == np.float64
        np.testing.assert_array_equal(out, expected)


def test_dtype_float32_computes_everything_in_it():
    q, k, v = (x.astype(np.float32) for x in inputs((2, 2, 6, 6, 8, 4)))
    three_lines = q @ k.swapaxes(-1, -2) * np.float32(1 / np.sqrt(8))
    three_lines = np.exp(three_lines - three_lines.max(-1, keepdims=True))
    three_lines = (three_lines / three_lines.sum(-1, keepdims=True)) @ v
    np.testing.assert_allclose(reference.attention(q, k, v, dtype=np.float32), three_lines, rtol=1e-6, atol=1e-7)
    everything = {"mask": np.zeros((6, 6)), "bias": np.zeros(6), "alibi_slopes": np.ones(2), "sinks": np.ones(2),
                  "softcap": np.float64(3), "scale": np.array(0.3), "causal": True}  # fmt: skip
    results = reference.attention(q, k, v, dtype=np.float32, return_lse=True, **everything)
    assert [x.dtype for x in results] == [np.float32] * 2
    exact = reference.attention(q, k, v, **everything)
    assert 0 < np.abs(results[0] - exact).max() < 1e-6


@pytest.mark.parametrize("zero", ["h", "n", "s", "d", "e", "lead"])
def test_any_axis_may_be_empty(zero):
    size = {name: 0 if name == zero else 2 for name in ("lead", "h", "n", "s", "d", "e")}
    q = np.ones((size["lead"], size["h"], size["n"], size["d"]))
    k = np.ones((size["lead"], size["h"], size["s"], size["d"]))
    v = np.arange(4.0).reshape(2, 2)[: size["s"], : size["e"]] + np.zeros((size["lead"], size["h"], 1, 1))
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert out.shape == (size["lead"], size["h"], size["n"], size["e"])
    assert lse.shape == out.shape[:-1]
    np.testing.assert_array_equal(out, 0.0 if zero == "s" else np.broadcast_to([1.0, 2.0][: size["e"]], out.shape))
    score = 0.0 if zero == "d" else math.sqrt(2)
    np.testing.assert_allclose(lse, -INF if zero == "s" else score + math.log(2), rtol=1e-15)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (2, 4), (2, 0)])
def test_head_counts_must_divide(heads, kv_heads):
    kv = np.ones((kv_heads, 3, 2))
    with pytest.raises(ValueError, match=f"divide the {heads} query heads, got {kv_heads}"):
        reference.attention(np.ones((heads, 3, 2)), kv, kv)


def test_arguments_are_left_alone():
    q, k, v = inputs((2, 1, 3, 4, 2, 2))
    mask = np.array([True, False, True, True])
    before = [x.copy() for x in (q, k, v, mask)]
    reference.attention(q, k, v, mask=mask, causal=True)
    for array, copy in zip((q, k, v, mask), before, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("name", reference.__all__)
def test_every_function_documents_itself(name):
    text = inspect.getdoc(getattr(reference, name))
    for section in ("Parameters", "Returns", "Raises", "Examples"):
        assert f"\n{section}\n---" in text
