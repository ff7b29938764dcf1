"""What must not matter, and what must follow from what: relations between calls, whatever the numbers are."""

import sys

import numpy as np
import pytest
from inputs import BFLOAT16, DTYPES, normal, qkv

from fastattn import attention, attention_varlen

pytestmark = pytest.mark.usefixtures("isa")

THREADS = [2, 3, 5, 8, 64, 10_000]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (70, 3)},
    "mask": {"mask": lambda n, s: np.random.default_rng(1).random((n, s)) > 0.3},
    "float mask": {"mask": lambda n, s: normal(n, s)},
    "softcap and bias": {"softcap": 3.0, "bias": lambda n, s: normal(n, s, dtype=np.float64)},
}
every_option = pytest.mark.parametrize("option", OPTIONS)


def options_for(option, q, k):
    given = OPTIONS[option]
    return {name: value(q.shape[-2], k.shape[-2]) if callable(value) else value for name, value in given.items()}


def same(actual, expected):
    """Bit for bit, the sign of a zero and the payload of a NaN apart."""
    if isinstance(actual, tuple):
        return all(same(a, b) for a, b in zip(actual, expected, strict=True))
    return actual.dtype == expected.dtype and np.array_equal(
        actual.astype(np.float64), expected.astype(np.float64), equal_nan=True
    )


@pytest.mark.parametrize("dtypes", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1, 1), (1, 1, 1, 33, 33), (3, 5, 5, 65, 65), (1, 2, 1, 1, 5000), (1, 2, 2, 250, 250), (2, 8, 1, 3, 700)],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
@every_option
def test_thread_count(dtypes, sizes, option):
    q, k, v = qkv(*sizes, 16, dtypes=dtypes)
    options = options_for(option, q, k)
    serial = attention(q, k, v, **options, return_lse=True, num_threads=1)
    for num_threads in THREADS:
        assert same(attention(q, k, v, **options, return_lse=True, num_threads=num_threads), serial)


@pytest.mark.parametrize("dtypes", ["float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("key", [5, 120, 599])
def test_thread_count_with_bad_values_hidden_from_some_rows(dtypes, bad, key):
    q, k, v = qkv(1, 2, 2, 600, 600, 16, dtypes=dtypes)
    v[:, :, key] = bad
    serial = attention(q, k, v, causal=True, num_threads=1)
    for num_threads in THREADS:
        assert same(attention(q, k, v, causal=True, num_threads=num_threads), serial)


@pytest.mark.parametrize("longest", [0, 4, 8])
@pytest.mark.parametrize("dim", [8, 600])
def test_thread_count_with_entries_of_unlike_lengths(longest, dim):
    """Most of the work is in few items: a worker that has none of them takes those of others. With 600 features all
    draw from the same ones."""
    lengths = np.array([1, 40, 0, 3, 17, 1, 64, 0, 33])
    lengths[longest] = 700
    bounds = np.cumsum([0, *lengths])
    q, k, v = (normal(bounds[-1], 2, dim, seed=seed) for seed in range(3))
    serial = attention_varlen(q, k, v, bounds, bounds, causal=True, return_lse=True, num_threads=1)
    for num_threads in THREADS:
        actual = attention_varlen(q, k, v, bounds, bounds, causal=True, return_lse=True, num_threads=num_threads)
        assert same(actual, serial)


@every_option
def test_repeated_runs(option):
    q, k, v = qkv(2, 4, 2, 200, 200, 16)
    options = options_for(option, q, k)
    first = attention(q, k, v, **options, num_threads=2)
    for _ in range(6):
        assert same(attention(q, k, v, **options, num_threads=2), first)


@pytest.mark.parametrize("dtypes", ["float32", "float64", "float32-bfloat16"])
@every_option
def test_batch_mates(dtypes, option):
    q, k, v = qkv(5, 4, 2, 70, 130, 16, dtypes=dtypes)
    options = options_for(option, q, k)
    lengths = np.array([130, 7, 64, 0, 129])
    k[0, :, 5], v[4, :, 3] = np.nan, np.inf
    together = attention(q, k, v, **options, kv_lens=lengths, return_lse=True)
    for entry in range(5):
        one = slice(entry, entry + 1)
        alone = attention(q[one], k[one], v[one], **options, kv_lens=lengths[one], return_lse=True)
        assert same(alone, tuple(x[one] for x in together))
    pair = [3, 1]
    two = attention(q[pair], k[pair], v[pair], **options, kv_lens=lengths[pair], return_lse=True)
    assert same(two, tuple(x[pair] for x in together))


@pytest.mark.parametrize("dtypes", ["float32", "float64"])
@pytest.mark.parametrize("names", [["mask"], ["bias"], ["mask", "bias"]], ids=" and ".join)
@pytest.mark.parametrize("n_queries", [3, 40])
def test_extreme_biases_of_one_row_leave_the_others_as_they_are(dtypes, names, n_queries):
    """They are added with care, and in one row only; the scale is inexact, so that it shows where sums are rounded."""
    q, k, v = qkv(1, 2, 2, n_queries, 300, 80, dtypes=dtypes)
    ordinary = {name: normal(n_queries, 300, dtype=q.dtype, seed=i) for i, name in enumerate(names)}
    before = attention(q, k, v, **ordinary)
    for extreme in (-np.inf, np.finfo(q.dtype).min, np.finfo(q.dtype).max):
        changed = {name: bias.copy() for name, bias in ordinary.items()}
        changed[names[0]][1, [3, 290]] = extreme
        after = attention(q, k, v, **changed)
        assert same(np.delete(after, 1, axis=2), np.delete(before, 1, axis=2))
        assert not same(after[:, :, 1], before[:, :, 1])


@pytest.mark.parametrize("dtypes", ["float32", "float64", "float16", "float32-bfloat16"])
@pytest.mark.parametrize("features", [1, 3, 8, 9, 17, 31])
@pytest.mark.parametrize("n_queries", [1, 2, 40])
def test_what_excluded_values_hold_changes_no_bit(dtypes, features, n_queries):
    q, k, v = qkv(1, 2, 2, n_queries, 70, 5, features, dtypes=dtypes)
    mask = np.arange(70) != 33
    before = attention(q, k, v, mask=mask)
    v[0, 0, 33] = np.nan
    assert same(attention(q, k, v, mask=mask), before)
    mask = np.stack([np.ones(70, bool), mask])[:, None]  # now seen, by the first head
    mask[1, 0, 40] = False
    v[0, 0, 33], v[0, 1, 33] = 1, np.inf
    after = attention(q, k, v, mask=mask)
    mask[0, 0, 12] = False
    assert same(attention(q, k, v, mask=mask)[:, 1], after[:, 1])


@pytest.mark.parametrize("dtypes", ["float32", "float64", "float16", "float32-float16"])
@pytest.mark.parametrize("n_queries", [1, 20])
def test_layout_of_keys_and_values(dtypes, n_queries):
    q, k, v = qkv(1, 2, 2, n_queries, 70, 5, 9, dtypes=dtypes)
    before = attention(q, k, v)
    assert same(attention(q, np.asfortranarray(k), v), before)
    assert same(attention(q, k, np.asfortranarray(v)), before)


@pytest.mark.parametrize("dtypes", ["float32", "float64", "float16"])
@every_option
@pytest.mark.parametrize("group", [1, 3])
def test_slices_of_head_groups(dtypes, option, group):
    q, k, v = qkv(1, 4 * group, 4, 37, 130, 16, dtypes=dtypes)
    options = options_for(option, q, k)
    slopes, sinks = normal(4 * group, seed=8), normal(4 * group, seed=9)
    together = attention(q, k, v, **options, alibi_slopes=slopes, sinks=sinks, return_lse=True)
    for first, last in ((0, 1), (1, 3), (3, 4)):
        heads = slice(first * group, last * group)
        part = attention(
            q[:, heads], k[:, first:last], v[:, first:last], **options, alibi_slopes=slopes[heads],
            sinks=sinks[heads], return_lse=True,
        )  # fmt: skip
        assert same(part, tuple(x[:, heads] for x in together))


@pytest.mark.parametrize("dtypes", ["float32", "float64"])
def test_joint_permutation_of_keys_and_values(dtypes):
    q, k, v = qkv(2, 4, 2, 20, 300, 16, dtypes=dtypes)
    mask, order = normal(20, 300) > 0, np.random.default_rng(0).permutation(300)
    expected = attention(q, k, v, mask=mask)
    actual = attention(q, k[:, :, order], v[:, :, order], mask=mask[:, order])
    assert np.allclose(actual, expected, rtol=0, atol=64 * np.finfo(q.dtype).eps)


@pytest.mark.parametrize("dtypes", DTYPES)
@every_option
def test_constant_values_give_the_constant(dtypes, option):
    q, k, v = qkv(1, 2, 1, 33, 300, 16, dtypes=dtypes)
    v[...] = 3.25
    result = attention(q, k, v, **options_for(option, q, k)).astype(np.float64)
    eps = np.finfo(np.float64 if q.dtype == np.float64 else np.float32).eps
    assert np.abs(result - 3.25).max() <= 16 * eps * 3.25


@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 9, 16, 100])
@pytest.mark.parametrize("n", [23, 130])
def test_chunks_of_a_causal_call(chunk, n):
    q, k, v = qkv(2, 4, 2, n, n)
    full = attention(q, k, v, causal=True)
    for start in range(0, n, chunk):
        end = min(start + chunk, n)
        part = attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end], causal=True)
        assert np.allclose(part, full[:, :, start:end], rtol=0, atol=1e-6)
        part = attention(q[:, :, start:end], k, v, causal=True, q_offset=start)
        assert np.allclose(part, full[:, :, start:end], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtypes", ["float32", "float64"])
def test_a_causal_prefix_does_not_see_the_future(dtypes):
    q, k, v = qkv(1, 2, 1, 230, 230, dtypes=dtypes)
    before = attention(q, k, v, causal=True)
    for cut in (1, 95, 100, 192, 229):
        changed = [x.copy() for x in (k, v)]
        for x in changed:
            x[:, :, cut:] = 1e3
        after = attention(q, *changed, causal=True)
        assert same(after[:, :, :cut], before[:, :, :cut])


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("n_queries", [1, 20])
def test_one_attended_key_returns_its_value_row(dtypes, n_queries):
    q, k, v = qkv(1, 4, 2, n_queries, 210, 16, dtypes=dtypes)
    wanted = np.repeat(v, 2, axis=1)
    for key in (0, 97, 191, 192, 209):
        row = np.broadcast_to(wanted[:, :, key : key + 1], q.shape)
        assert same(attention(q, k, v, mask=np.arange(210) == key).astype(v.dtype), row)
        assert same(attention(q, k, v, bias=np.where(np.arange(210) == key, 1.5, -np.inf)).astype(v.dtype), row)
    assert same(attention(q, k, v, kv_lens=1).astype(v.dtype), np.broadcast_to(wanted[:, :, :1], q.shape))
    last = attention(q, k[:, :, :n_queries], v[:, :, :n_queries], window=(0, 0))
    assert same(last.astype(v.dtype), wanted[:, :, :n_queries])


def test_scale_zero_is_the_mean_and_negation_is_scale():
    q, k, v = qkv(1, 2, 1, 5, 250, 8)
    assert np.allclose(attention(q, k, v, scale=0), v.mean(2, keepdims=True), rtol=0, atol=1e-6)
    assert same(attention(q, k, v, scale=-0.5), attention(-q, k, v, scale=0.5))


def test_equal_shifts_of_all_scores_change_nothing():
    q, k, v = qkv(1, 2, 1, 5, 250, 8)
    expected = attention(q, k, v)
    assert np.allclose(attention(q, k, v, mask=np.full((5, 250), 20.0)), expected, rtol=0, atol=1e-5)


def arguments_of_every_kind():
    q, k, v = qkv(2, 4, 2, 9, 37)
    return {
        "q": q, "k": k, "v": v, "mask": normal(9, 37) > -1, "bias": normal(4, 9, 37, dtype=np.float16),
        "q_offset": np.array([20, 5]), "kv_lens": np.array([37, 12]), "alibi_slopes": normal(4), "sinks": normal(4),
        "scale": np.array(0.5), "softcap": np.float32(3),
    }  # fmt: skip


def test_inputs_are_untouched():
    arguments = arguments_of_every_kind()
    copies = {name: value.copy() for name, value in arguments.items()}
    attention(**arguments, causal=True, return_lse=True)
    for name, value in arguments.items():
        assert value.tobytes() == copies[name].tobytes(), name


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"mask": np.ones((3, 3), bool)}, {"kv_lens": np.array([1, 99])}, {"sinks": np.ones(3)},
        {"v": normal(2, 2, 36, 8)}, {"out": np.empty((2, 4, 9, 8))}, {"scale": np.array(np.inf)},
        {"bias": np.ones((9, 37), int)}, {"alibi_slopes": np.array(["a"])},
    ],
    ids=lambda wrong: next(iter(wrong), "success"),
)  # fmt: skip
def test_reference_counts(wrong):
    arguments = arguments_of_every_kind() | {"out": np.empty((2, 4, 9, 8), np.float32)} | wrong
    values = list(arguments.values())

    def call():
        try:
            attention(**arguments, causal=True)
        except (TypeError, ValueError):
            return "raised"
        return "returned"

    attention(*qkv())  # whatever the outcome, the kernel was reached
    assert call() == ("raised" if wrong else "returned")
    before = [sys.getrefcount(value) for value in values]
    for _ in range(5):
        call()
    assert [sys.getrefcount(value) for value in values] == before


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "out_dtype", "lse_dtype"),
    [
        (np.float32, np.float32, np.float32, np.float32),
        (np.float64, np.float64, np.float64, np.float64),
        (np.float16, np.float16, np.float16, np.float32),
        (BFLOAT16, BFLOAT16, BFLOAT16, np.float32),
        (np.float32, np.float16, np.float32, np.float32),
        (np.float32, BFLOAT16, np.float32, np.float32),
        (np.int32, np.float64, np.float64, np.float64),
        (np.bool_, np.uint8, np.float64, np.float64),
    ],
)
def test_dtypes_of_the_results(q_dtype, kv_dtype, out_dtype, lse_dtype):
    q, k, v = (x.astype(dtype) for x, dtype in zip(qkv(), (q_dtype, kv_dtype, kv_dtype), strict=True))
    for options in ({}, {"scale": np.float64(1)}, {"scale": np.array(1.0)}, {"mask": np.zeros((5, 37), np.float64)}):
        out, lse = attention(q, k, v, **options, return_lse=True)
        assert (out.dtype, lse.dtype) == (out_dtype, lse_dtype)
        assert attention(q, k, v, **options).dtype == out_dtype
        assert lse.shape == out.shape[:-1]
