"""`KVCache`: contents against a plain model, attention against the oracle, errors that change nothing."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from caches import DTYPES, contents, padded, readable, rows_for, state
from checker import assert_attention_close
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from inputs import normal

from fastattn import KVCache, attention, reference

BATCH, HEADS, CAPACITY, DIM, VALUE_DIM = 2, 2, 8, 4, 3


def filled(dtype="float32", lengths=(5, 3), value_dim=VALUE_DIM):
    """A cache with rows, and the k and v that went in."""
    stored, given = DTYPES[dtype]
    cache = KVCache(BATCH, HEADS, CAPACITY, DIM, value_dim=value_dim, dtype=stored)
    k, v = rows_for((BATCH,), HEADS, max(lengths), DIM, value_dim, given, seed=1)
    cache.append(k, v, lengths=lengths)
    return cache, k, v


class Machine(RuleBasedStateMachine):
    """A cache beside a list of (k, v) for each entry."""

    @initialize(
        dtype=st.sampled_from(list(DTYPES)),
        batch=st.integers(1, 3),
        heads=st.integers(1, 2),
        capacity=st.integers(0, 12),
        value_dim=st.sampled_from([DIM, 1, 5]),
    )
    def begin(self, dtype, batch, heads, capacity, value_dim):
        self.stored, self.given = DTYPES[dtype]
        self.cache = KVCache(batch, heads, capacity, DIM, value_dim=value_dim, dtype=self.stored)
        self.sizes = (heads, DIM, value_dim)
        empty = rows_for((), heads, 0, DIM, value_dim, self.given, seed=0)
        self.model = [tuple(readable(x, self.stored) for x in empty) for _ in range(batch)]
        self.seed = 0

    @property
    def lengths(self):
        return [k.shape[1] for k, _ in self.model]

    @rule(data=st.data(), n=st.integers(0, 5), ragged=st.booleans())
    def append(self, data, n, ragged):
        self.seed += 1
        heads, dim, value_dim = self.sizes
        k, v = rows_for((len(self.model),), heads, n, dim, value_dim, self.given, self.seed)
        counts = [data.draw(st.integers(0, n)) if ragged else n for _ in self.model]
        for entry, count in enumerate(counts):
            k[entry, :, count:] = np.nan  # must not be looked at
        lengths = counts if ragged else None
        if any(have + count > self.cache.capacity for have, count in zip(self.lengths, counts, strict=True)):
            before = state(self.cache)
            with pytest.raises(ValueError, match="k and v must fit the capacity"):
                self.cache.append(k, v, lengths)
            assert state(self.cache) == before
            return
        self.cache.append(k, v, lengths)
        for entry, count in enumerate(counts):
            new = (readable(x[entry, :, :count], self.stored) for x in (k, v))
            self.model[entry] = tuple(np.concatenate(pair, axis=1) for pair in zip(self.model[entry], new, strict=True))

    @rule(data=st.data())
    def truncate(self, data):
        kept = [data.draw(st.integers(0, length)) for length in self.lengths]
        self.cache.truncate(kept)
        self.model = [(k[:, :n], v[:, :n]) for (k, v), n in zip(self.model, kept, strict=True)]

    @rule(data=st.data())
    def reorder(self, data):
        index = [data.draw(st.integers(0, len(self.model) - 1)) for _ in self.model]
        self.cache.reorder(index)
        self.model = [self.model[entry] for entry in index]

    @precondition(lambda self: any(self.lengths))
    @rule()
    def reset(self):
        self.cache.reset()
        self.model = [(k[:, :0], v[:, :0]) for k, v in self.model]

    @rule(n_queries=st.integers(1, 4), group=st.integers(1, 3), causal=st.booleans(), left=st.integers(-1, 4))
    def attend(self, n_queries, group, causal, left):
        q = normal(len(self.model), group * self.sizes[0], n_queries, DIM, dtype=self.given, seed=self.seed)
        options = {"causal": causal, "window": (left, -1), "return_lse": True}
        k, v = (padded([entry[i] for entry in self.model], max(self.lengths)) for i in (0, 1))
        actual = self.cache.attend(q, **options)
        assert_attention_close(actual, q, k, v, kv_lens=self.lengths, **options)

    @invariant()
    def same_contents(self):
        assert self.cache.lengths.tolist() == self.lengths
        keys, values = contents(self.cache), contents(self.cache, of_keys=False)
        assert keys.shape[2] == values.shape[2] == max(self.lengths)
        for entry, (k, v) in enumerate(self.model):
            np.testing.assert_array_equal(keys[entry, :, : k.shape[1]], k)
            np.testing.assert_array_equal(values[entry, :, : v.shape[1]], v)


TestMachine = Machine.TestCase
# Always the same examples: the bound compares two largest errors of a few numbers each, which chance may exceed.
TestMachine.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=20, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_by_token_is_the_whole(isa, dtype):
    stored, given = DTYPES[dtype]
    q = normal(BATCH, 2 * HEADS, 70, DIM, dtype=given)
    k, v = rows_for((BATCH,), HEADS, 70, DIM, DIM, given, seed=3)
    cache = KVCache(BATCH, HEADS, 70, DIM, dtype=stored)
    for step in range(70):
        now = (slice(None), slice(None), slice(step, step + 1))
        cache.append(k[now], v[now])
        out = cache.attend(q[now], window=(40, 0))
        seen = (readable(x[:, :, : step + 1], stored) for x in (k, v))
        assert_attention_close(out, q[now], *seen, causal=True, window=(40, 0))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_half_rows_are_rounded_to_even_and_overflow_to_infinity(stored):
    cache = KVCache(1, 1, 8, 1, dtype=stored)
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.nan, -np.inf], np.float32)
    cache.append(x.reshape(1, 1, 7, 1), x.reshape(1, 1, 7, 1))
    expected = {np.float16: [1, 1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, np.inf, np.nan, -np.inf]}.get(
        stored, [1, 1, 1, 1 + 2**-6, np.inf, np.nan, -np.inf]
    )
    for array in (cache.keys, cache.values):
        assert array.dtype == stored
        np.testing.assert_array_equal(array.ravel().astype(np.float32), np.array(expected, np.float32))


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 16), (1, 1000), (20, 300)])
def test_error_of_int8_is_within_its_bound(isa, n_queries, n_keys):
    """Half a step for each value, and for each score the sum of |q| times half a step of the key."""
    q = normal(1, 4, n_queries, 64)
    k, v = rows_for((1,), 4, n_keys, 64, 64, np.float32, seed=5)
    cache = KVCache(1, 4, n_keys, 64, dtype=np.int8)
    cache.append(k, v)
    out = cache.attend(q)
    exact = reference.attention(q, k, v, causal=True)
    score_error = np.abs(q).sum(-1).max() / 8 * np.abs(k).max() / 254
    allowed = np.abs(v).max() / 254 + np.expm1(2 * score_error) * np.abs(v).max()
    typical = np.abs(v).max() / 254 / np.sqrt(n_keys)
    error = np.abs(out - exact).max()
    assert error <= allowed
    assert error > typical / 100, "an int8 cache that has no error is not one"


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float64", 128), ("float32", 64), ("float16", 32), ("bfloat16", 32), ("int8", 16 + 8)]
)
def test_bytes_of_a_token(dtype, expected):
    stored, _ = DTYPES[dtype]
    assert KVCache(3, 5, 7, 8, dtype=stored).nbytes == 3 * 5 * 7 * expected


@pytest.mark.parametrize("n_queries", [1, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_reads_the_cache_in_place(dtype, n_queries):
    stored, given = DTYPES[dtype]
    cache = KVCache(2, 4, 3000, 64, dtype=stored)
    k = np.ones((2, 4, 2999, 64), given)
    cache.append(k, k, lengths=[2999, 1500])
    q = np.ones((2, 4, n_queries, 64), given)
    cache.attend(q)
    tracemalloc.start()
    try:
        cache.attend(q, num_threads=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < cache.nbytes / 20


@pytest.mark.parametrize("lengths", [[8, 3], [7, 3]])
def test_a_full_entry_is_refused_before_anything_is_written(lengths):
    """Dao-AILab/flash-attention#638 and #2711, sgl-project/sglang#29271, huggingface/candle#3035: one token, entry by
    entry, and what lies beside the cache stays as it is."""
    cache = KVCache(2, 1, 8, 4)
    rows = np.ones((2, 1, 8, 4), np.float32)
    cache.append(rows, rows, lengths=lengths)
    token = np.full((2, 1, 1, 4), 7, np.float32)
    if max(lengths) == cache.capacity:
        with pytest.raises(ValueError, match=r"capacity of 8 rows, got 1 for entry 0, which holds 8"):
            cache.append(token, token)
        assert list(cache.lengths) == lengths
    else:
        cache.append(token, token)
        assert list(cache.lengths) == [8, 4]
        rows[0, :, 7], rows[1, :, 3] = 7, 7
    for stored in (cache.keys, cache.values):
        assert all(np.array_equal(stored[i, :, :n], rows[i, :, :n]) for i, n in enumerate(cache.lengths))


def test_views_are_the_cache():
    cache, _, _ = filled()
    assert np.shares_memory(cache.keys, cache._keys[0])
    assert (cache.keys.shape, cache.values.shape) == ((2, 2, 5, 4), (2, 2, 5, 3))
    cache.keys[0, 0, 0] = 7
    assert (cache.keys[0, 0, 0] == 7).all()
    assert cache.key_scales is cache.value_scales is None
    lengths = cache.lengths
    lengths += 1
    assert cache.lengths.tolist() == [5, 3]
    int8, _, _ = filled("int8")
    assert (int8.key_scales.shape, int8.value_scales.shape) == ((2, 2, 5), (2, 2, 5))
    assert int8.keys.dtype == np.int8


def test_attributes_and_text():
    cache, _, _ = filled("float16")
    sizes = (cache.batch, cache.num_kv_heads, cache.capacity, cache.head_dim, cache.value_dim)
    assert sizes == (BATCH, HEADS, CAPACITY, DIM, VALUE_DIM)
    assert cache.dtype == np.float16
    assert repr(cache) == "<KVCache of 2 x 8 rows of 2 heads, 4 and 3 features in float16, lengths [5 3]>"


def test_appending_views_of_the_cache():
    cache, _, _ = filled(lengths=(5, 5), value_dim=DIM)
    old_keys, old_values = cache.keys, cache.values
    cache.truncate(2)
    expected = old_values[:, :, 1:4].copy(), old_keys[::-1, :, 2:5].copy()
    cache.append(old_values[:, :, 1:4], old_keys[::-1, :, 2:5])
    np.testing.assert_array_equal(cache.keys[:, :, 2:], expected[0])
    np.testing.assert_array_equal(cache.values[:, :, 2:], expected[1])


def test_rows_past_an_entrys_length_are_never_read(isa):
    cache, _, _ = filled()
    cache.keys[1, :, 3:] = np.nan
    cache.values[1, :, 3:] = np.inf
    assert np.isfinite(cache.attend(normal(BATCH, HEADS, 3, DIM))).all()


def test_other_options_and_out():
    cache, k, v = filled()
    q, mask = normal(BATCH, 4, 2, DIM), np.random.default_rng(0).random((BATCH, 1, 2, 5)) < 0.8
    options = {"mask": mask, "softcap": 2.0, "scale": 0.3, "sinks": np.ones(4), "alibi_slopes": np.ones(4)}
    out = np.empty((BATCH, 4, 2, VALUE_DIM), np.float32)
    assert cache.attend(q, out=out, **options) is out
    assert_attention_close(out, q, k, v, causal=True, kv_lens=[5, 3], **options)
    np.testing.assert_array_equal(cache.attend(q, causal=False), attention(q, k, v, kv_lens=[5, 3]))


def test_an_empty_batch_and_an_empty_cache():
    cache = KVCache(0, 1, 4, 2)
    cache.append(np.ones((0, 1, 3, 2), np.float32), np.ones((0, 1, 3, 2), np.float32), lengths=[])
    cache.reorder([])
    cache.truncate(0)
    assert cache.attend(np.ones((0, 1, 1, 2), np.float32)).shape == (0, 1, 1, 2)
    assert not KVCache(2, 1, 4, 2).attend(np.ones((2, 3, 1, 2), np.float32)).any()


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "batch must be at least 0, got -1", {"batch": -1}),
        (ValueError, "num_kv_heads must be at least 1, got 0", {"num_kv_heads": 0}),
        (ValueError, "capacity must be at least 0, got -5", {"capacity": -5}),
        (ValueError, "head_dim must be at least 1, got 0", {"head_dim": 0}),
        (ValueError, "value_dim must be at least 1, got 0", {"value_dim": 0}),
        (TypeError, "capacity must be an integer, got 8.0", {"capacity": 8.0}),
        (TypeError, "batch must be an integer, got True", {"batch": True}),
        (TypeError, r"dtype must be .* int8, in native byte order, got int32", {"dtype": np.int32}),
        (TypeError, "dtype must be .*, got float8_e4m3fn", {"dtype": ml_dtypes.float8_e4m3fn}),
        (TypeError, "dtype must be .*, got float8_e5m2", {"dtype": ml_dtypes.float8_e5m2}),
        (TypeError, "dtype must be .*, got None", {"dtype": None}),
        (TypeError, "dtype must be .*, got 'half a byte'", {"dtype": "half a byte"}),
        (TypeError, "dtype must be .*, got complex64", {"dtype": np.complex64}),
        (TypeError, "dtype must be .*, got >f4", {"dtype": ">f4"}),
    ],
)  # fmt: skip
def test_what_a_cache_cannot_be(error, match, arguments):
    sizes = {"batch": BATCH, "num_kv_heads": HEADS, "capacity": CAPACITY, "head_dim": DIM}
    with pytest.raises(error, match=match):
        KVCache(**sizes | arguments)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


K2, V2 = (BATCH, HEADS, 2, DIM), (BATCH, HEADS, 2, VALUE_DIM)
BAD_CALLS = {
    "k of another dtype": (TypeError, "k must be float32 for a cache of float32, got float64",
        lambda c: c.append(ones(*K2, dtype=np.float64), ones(*V2))),
    "v of another dtype": (TypeError, "v must be float32 for a cache of float32, got float16",
        lambda c: c.append(ones(*K2), ones(*V2, dtype=np.float16))),
    "lists": (TypeError, "k must be float32 .* got float64", lambda c: c.append(ones(*K2).tolist(), ones(*V2))),
    "integers": (TypeError, "k must be float32 .* got int64", lambda c: c.append(ones(*K2, dtype=np.int64), ones(*V2))),
    "codes": (TypeError, "k must be floats, which an int8 cache quantizes itself, got int8",
        lambda c: c.append(ones(*K2, dtype=np.int8), ones(*V2, dtype=np.int8))),
    "float8": (TypeError, "k must be float32 .* got float8_e4m3fn",
        lambda c: c.append(ones(*K2, dtype=ml_dtypes.float8_e4m3fn), ones(*V2))),
    "heads of k": (ValueError, r"k must have shape \(2, 2, n, 4\), got \(2, 4, 2, 4\)",
        lambda c: c.append(ones(2, 4, 2, 4), ones(*V2))),
    "heads of v": (ValueError, r"v must have shape \(2, 2, n, 3\), got \(2, 1, 2, 3\)",
        lambda c: c.append(ones(*K2), ones(2, 1, 2, 3))),
    "batch of k": (ValueError, r"k must have shape \(2, 2, n, 4\), got \(3, 2, 2, 4\)",
        lambda c: c.append(ones(3, 2, 2, 4), ones(*V2))),
    "features of v": (ValueError, r"v must have shape \(2, 2, n, 3\), got \(2, 2, 2, 4\)",
        lambda c: c.append(ones(*K2), ones(*K2))),
    "axes of k": (ValueError, r"k must have shape \(2, 2, n, 4\), got \(2, 2, 4\)",
        lambda c: c.append(ones(2, 2, 4), ones(2, 2, 3))),
    "rows of v": (ValueError, "v must have as many rows as k, 2, got 1",
        lambda c: c.append(ones(*K2), ones(2, 2, 1, 3))),
    "too many rows": (ValueError, "k and v must fit the capacity of 8 rows, got 4 for entry 0, which holds 5",
        lambda c: c.append(ones(2, 2, 4, 4), ones(2, 2, 4, 3))),
    "too many rows for one": (ValueError, "capacity of 8 rows, got 6 for entry 1, which holds 3",
        lambda c: c.append(ones(2, 2, 6, 4), ones(2, 2, 6, 3), lengths=[0, 6])),
    "negative lengths": (ValueError, r"lengths must lie in 0 \.\.\. 2, the rows given, got -1",
        lambda c: c.append(ones(*K2), ones(*V2), lengths=[1, -1])),
    "lengths beyond the rows": (ValueError, r"lengths must lie in 0 \.\.\. 2, the rows given, got 3",
        lambda c: c.append(ones(*K2), ones(*V2), lengths=3)),
    "float lengths": (TypeError, "lengths must be integers, got float64",
        lambda c: c.append(ones(*K2), ones(*V2), lengths=[1.0, 2.0])),
    "shape of lengths": (ValueError, r"lengths must be one integer or have shape \(2,\), got \(3,\)",
        lambda c: c.append(ones(*K2), ones(*V2), lengths=[1, 2, 1])),
    "truncate beyond": (ValueError, r"n must lie in 0 \.\.\. 3, the rows that entry 1 holds, got 5",
        lambda c: c.truncate(5)),
    "truncate below": (ValueError, r"n must lie in 0 \.\.\. 5, the rows that entry 0 holds, got -1",
        lambda c: c.truncate(-1)),
    "truncate to a float": (TypeError, "n must be integers, got float64", lambda c: c.truncate(1.0)),
    "reorder to nowhere": (ValueError, r"index must lie in 0 \.\.\. 1, the entries, got 2",
        lambda c: c.reorder([0, 2])),
    "reorder backwards": (ValueError, r"index must lie in 0 \.\.\. 1, the entries, got -1",
        lambda c: c.reorder([0, -1])),
    "reorder by one number": (ValueError, r"index must have shape \(2,\), got \(\)", lambda c: c.reorder(0)),
    "reorder by floats": (TypeError, "index must be integers, got float64", lambda c: c.reorder([0.0, 1.0])),
    "kv_lens": (TypeError, "kv_lens must be left out, because the cache gives its own, got 3",
        lambda c: c.attend(ones(2, 2, 1, 4), kv_lens=3)),
    "block_table": (TypeError, "block_table must be left out", lambda c: c.attend(ones(2, 2, 1, 4), block_table=[[0]])),
    "batch of q": (ValueError, r"q must have shape \(2, H, N, 4\), got \(1, 2, 1, 4\)",
        lambda c: c.attend(ones(1, 2, 1, 4))),
    "axes of q": (ValueError, r"q must have shape \(2, H, N, 4\), got \(2, 1, 4\)", lambda c: c.attend(ones(2, 1, 4))),
    "heads of q": (ValueError, "q's number of heads must be a multiple of k's, got 3 and 2",
        lambda c: c.attend(ones(2, 3, 1, 4))),
    "features of q": (ValueError, "k must have shape .* to match q", lambda c: c.attend(ones(2, 2, 1, 5))),
    "dtype of q": (TypeError, "q, k and v must have the same dtype .*got float64",
        lambda c: c.attend(ones(2, 2, 1, 4, dtype=np.float64))),
    "an option that is none": (TypeError, "unexpected keyword argument 'casual'",
        lambda c: c.attend(ones(2, 2, 1, 4), casual=True)),
    "out in the cache": (ValueError, "out must not overlap an input, got memory that k uses",
        lambda c: c.attend(ones(2, 2, 5, 4), out=c.keys[..., :3])),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_leave_the_cache_alone(case):
    error, match, call = BAD_CALLS[case]
    cache, _, _ = filled()
    before = state(cache)
    with pytest.raises(error, match=match) as raised:
        call(cache)
    assert "\n" not in str(raised.value)
    assert state(cache) == before


@pytest.mark.parametrize(
    ("dtype", "error", "match", "k", "v"),
    [
        ("int8", TypeError, "k must be floats, which an int8 cache quantizes", np.int8, np.int8),
        ("int8", TypeError, "k must be float32, float16 or bfloat16 .* got float64", np.float64, np.float64),
        ("int8", TypeError, "k must be float32, float16 or bfloat16 .* got int16", np.int16, np.int16),
        ("int8", TypeError, "k and v must have the same dtype, got float32 and float16", np.float32, np.float16),
        ("float16", TypeError, "k must be float16 or float32 .*got bfloat16", ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        ("float16", TypeError, "k and v must have the same dtype, got float16 and float32", np.float16, np.float32),
        ("bfloat16", TypeError, "k must be bfloat16 or float32 .* got float16", np.float16, np.float16),
        ("float64", TypeError, "v must be float64 .* got float32", np.float64, np.float32),
    ],
)
def test_dtypes_that_do_not_go_together(dtype, error, match, k, v):
    cache, _, _ = filled(dtype)
    before = state(cache)
    with pytest.raises(error, match=match):
        cache.append(ones(*K2, dtype=k), ones(*V2, dtype=v))
    assert state(cache) == before


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_int8_refuses_what_has_no_scale(name, bad):
    cache, _, _ = filled("int8")
    before = state(cache)
    rows = {"k": ones(*K2), "v": ones(*V2)}
    rows[name][1, 1, 1, 2] = bad
    with pytest.raises(ValueError, match=f"{name} must be finite to be quantized, got {bad}"):
        cache.append(**rows)
    assert state(cache) == before
