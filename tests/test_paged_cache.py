"""`PagedKVCache`: contents, pages and counts against a plain model, attention against the oracle, errors."""

from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from caches import DTYPES, contents, padded, readable, rows_for, state
from checker import assert_attention_close
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from inputs import normal

from fastattn import KVCache, PagedKVCache, attention

HEADS, DIM, VALUE_DIM = 2, 4, 3


def sequence_rows(cache, sequence):
    """Keys (K, length, D) and values (K, length, E) of a sequence, read through its pages."""
    table, length = cache.block_table(sequence), int(cache.lengths(sequence))
    return [
        contents(cache, of_keys)[table].swapaxes(0, 1).reshape(cache.num_kv_heads, -1, features)[:, :length]
        for of_keys, features in ((True, cache.head_dim), (False, cache.value_dim))
    ]


class Machine(RuleBasedStateMachine):
    """A cache beside a dictionary of each sequence's k and v."""

    sequences = Bundle("sequences")

    @initialize(
        dtype=st.sampled_from(list(DTYPES)),
        n_pages=st.integers(0, 12),
        page_size=st.integers(1, 5),
        heads=st.integers(1, 2),
    )
    def begin(self, dtype, n_pages, page_size, heads):
        self.stored, self.given = DTYPES[dtype]
        self.heads = heads
        self.cache = PagedKVCache(n_pages, page_size, heads, DIM, value_dim=VALUE_DIM, dtype=self.stored)
        self.model = {}
        self.seed = 0

    def draw(self, lead, n):
        self.seed += 1
        return rows_for(lead, self.heads, n, DIM, VALUE_DIM, self.given, self.seed)

    @rule(target=sequences)
    def allocate(self):
        sequence = self.cache.allocate()
        assert sequence not in self.model
        self.model[sequence] = tuple(readable(x, self.stored) for x in self.draw((), 0))
        return sequence

    @rule(target=sequences, source=sequences, data=st.data(), whole=st.booleans())
    def fork(self, source, data, whole):
        k, v = self.model[source]
        length = None if whole else data.draw(st.integers(0, k.shape[1]))
        free = self.cache.num_free_pages
        sequence = self.cache.fork(source, length)
        assert self.cache.num_free_pages == free
        self.model[sequence] = (k[:, :length], v[:, :length])
        return sequence

    @rule(data=st.data(), chosen=st.lists(sequences, min_size=1, max_size=4, unique=True), n=st.integers(0, 7))
    def append(self, data, chosen, n):
        k, v = self.draw((len(chosen),), n)
        counts = [data.draw(st.integers(0, n)) for _ in chosen]
        for entry, count in enumerate(counts):
            k[entry, :, count:] = np.nan  # must not be looked at
        if self.pages_after(chosen, counts) > self.cache.num_pages:
            before = state(self.cache)
            with pytest.raises(ValueError, match="k and v must fit the pages that are free"):
                self.cache.append(k, v, chosen, counts)
            assert state(self.cache) == before
            return
        self.cache.append(k, v, chosen, counts)
        for entry, (sequence, count) in enumerate(zip(chosen, counts, strict=True)):
            new = (readable(x[entry, :, :count], self.stored) for x in (k, v))
            old = self.model[sequence]
            self.model[sequence] = tuple(np.concatenate(pair, axis=1) for pair in zip(old, new, strict=True))

    def pages_after(self, chosen, counts):
        """Pages in use if each appended sequence had its own copies of what it writes to."""
        size, used = self.cache.page_size, set()
        added = dict(zip(chosen, counts, strict=True))
        last_users = Counter(self.tail(sequence) for sequence in self.model)
        for sequence, (k, _) in self.model.items():
            table, count = self.cache.block_table(sequence).tolist(), added.get(sequence, 0)
            if count and k.shape[1] % size and last_users[table[-1]] > 1:
                last_users[table[-1]] -= 1
                table[-1] = ("own copy", sequence)
            used |= {*table, *(("new", sequence, i) for i in range(len(table), -(-(k.shape[1] + count) // size)))}
        return len(used)

    def tail(self, sequence):
        table = self.cache.block_table(sequence)
        return table[-1] if len(table) else None

    @rule(sequence=sequences, data=st.data())
    def truncate(self, sequence, data):
        k, v = self.model[sequence]
        n = data.draw(st.integers(0, k.shape[1]))
        self.cache.truncate(sequence, n)
        self.model[sequence] = (k[:, :n], v[:, :n])

    @rule(target=sequences, taken=consumes(sequences), as_list=st.booleans())
    def free(self, taken, as_list):
        self.cache.free([taken] if as_list else taken)
        del self.model[taken]
        with pytest.raises(ValueError, match=f"got {taken}, which has been freed"):
            self.cache.lengths(taken)
        return multiple()

    @rule(chosen=st.lists(sequences, min_size=1, max_size=4), n_queries=st.integers(1, 4), causal=st.booleans())
    def attend(self, chosen, n_queries, causal):
        q = normal(len(chosen), 2 * self.heads, n_queries, DIM, dtype=self.given, seed=self.seed)
        lengths = [self.model[sequence][0].shape[1] for sequence in chosen]
        k, v = (padded([self.model[sequence][i] for sequence in chosen], max(lengths)) for i in (0, 1))
        actual = self.cache.attend(q, chosen, causal=causal, return_lse=True)
        assert_attention_close(actual, q, k, v, causal=causal, kv_lens=lengths, return_lse=True)
        one = self.cache.attend(q[0], chosen[0], causal=causal)
        np.testing.assert_array_equal(one, actual[0][0])

    @invariant()
    def same_contents(self):
        assert self.cache.sequences == list(self.model)
        for sequence, expected in self.model.items():
            for array, wanted in zip(sequence_rows(self.cache, sequence), expected, strict=True):
                np.testing.assert_array_equal(array, wanted)

    @invariant()
    def pages_are_counted(self):
        users = Counter(page for sequence in self.model for page in self.cache.block_table(sequence).tolist())
        counts = self.cache.reference_counts
        assert {page: int(counts[page]) for page in np.flatnonzero(counts)} == users
        assert self.cache.num_free_pages == self.cache.num_pages - len(users)
        for sequence, (k, _) in self.model.items():
            assert len(self.cache.block_table(sequence)) == -(-k.shape[1] // self.cache.page_size)


TestMachine = Machine.TestCase
# Always the same examples: the bound compares two largest errors of a few numbers each, which chance may exceed.
TestMachine.settings = settings(
    deadline=None, max_examples=80, stateful_step_count=25, derandomize=True, suppress_health_check=list(HealthCheck)
)


def filled(dtype="float32", lengths=(5, 3), n_pages=6, page_size=4):
    """A cache with two sequences, 0 and 1."""
    stored, given = DTYPES[dtype]
    cache = PagedKVCache(n_pages, page_size, HEADS, DIM, value_dim=VALUE_DIM, dtype=stored)
    pair = [cache.allocate(), cache.allocate()]
    cache.append(*rows_for((2,), HEADS, max(lengths), DIM, VALUE_DIM, given, seed=1), pair, lengths)
    return cache


@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_attend_as_a_contiguous_cache_does(isa, dtype, page_size):
    stored, given = DTYPES[dtype]
    lengths, n = [130, 70, 0], 130
    k, v = rows_for((3,), HEADS, n, DIM, VALUE_DIM, given, seed=2)
    paged = PagedKVCache(400, page_size, HEADS, DIM, value_dim=VALUE_DIM, dtype=stored)
    contiguous = KVCache(3, HEADS, n, DIM, value_dim=VALUE_DIM, dtype=stored)
    sequences = [paged.allocate() for _ in range(3)]
    paged.append(k, v, sequences, lengths)
    contiguous.append(k, v, lengths)
    for n_queries in (1, 30):
        q = normal(3, 2 * HEADS, n_queries, DIM, dtype=given)
        seen = (readable(x, stored) for x in (k, v))
        out = paged.attend(q, sequences, window=(100, 0))
        assert_attention_close(out, q, *seen, causal=True, window=(100, 0), kv_lens=lengths)
        if page_size == 64:  # the kernels' own blocks: the same sums in the same order
            np.testing.assert_array_equal(out, contiguous.attend(q, window=(100, 0)))


def test_a_fork_copies_only_the_page_it_writes_to():
    cache = filled(lengths=(5, 3))
    fork = cache.fork(0)
    assert cache.reference_counts[cache.block_table(0)].tolist() == [2, 2]
    before = sequence_rows(cache, 0)
    cache.append(np.ones((HEADS, 1, DIM), np.float32), np.ones((HEADS, 1, VALUE_DIM), np.float32), fork)
    first, second = cache.block_table(0), cache.block_table(fork)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert cache.reference_counts[first].tolist() == [2, 1]
    for old, new in zip(before, sequence_rows(cache, 0), strict=True):
        np.testing.assert_array_equal(old, new)
    for old, new in zip(before, sequence_rows(cache, fork), strict=True):
        np.testing.assert_array_equal(old, new[:, :5])
        assert (new[:, 5] == 1).all()


def test_the_last_user_of_a_page_writes_in_place():
    cache = filled(lengths=(5, 3), n_pages=4)
    forks = [cache.fork(0), cache.fork(0)]
    assert cache.num_free_pages == 1
    x = np.ones((3, HEADS, 1, DIM), np.float32)
    before = state(cache)
    with pytest.raises(ValueError, match="rows for 2 more with 1 free"):  # two copies and not three
        cache.append(x, x[..., :VALUE_DIM], [0, *forks])
    assert state(cache) == before
    cache.free(0)
    cache.append(x[:2], x[:2, ..., :VALUE_DIM], forks)
    assert cache.num_free_pages == 0
    assert cache.reference_counts.tolist() == [2, 1, 1, 1]


def test_appending_views_of_the_cache():
    cache = PagedKVCache(6, 4, 1, DIM)
    first, second = cache.allocate(), cache.allocate()
    k, v = rows_for((), 1, 4, DIM, DIM, np.float32, seed=4)
    cache.append(k, v, first)
    cache.append(cache.values[0], cache.keys[0], second)
    cache.truncate(first, 2)
    cache.append(cache.values[0, :, 1:4], cache.keys[0, :, 1:4], first)
    rows = sequence_rows(cache, first)
    np.testing.assert_array_equal(rows[0], np.concatenate([k[:, :2], v[:, 1:4]], axis=1))
    np.testing.assert_array_equal(rows[1], np.concatenate([v[:, :2], k[:, 1:4]], axis=1))
    np.testing.assert_array_equal(sequence_rows(cache, second)[0], v)


def test_pages_and_table_are_what_attention_takes():
    cache, q = filled(), normal(2, HEADS, 2, DIM)
    direct = attention(
        q, cache.keys, cache.values, causal=True, block_table=cache.block_table([1, 0]), kv_lens=cache.lengths([1, 0])
    )
    np.testing.assert_array_equal(cache.attend(q, [1, 0]), direct)
    assert cache.keys.base is None
    mask = np.zeros((2, 1, 1, 8), bool)
    mask[..., 0] = True
    out = cache.attend(q, [0, 1], mask=mask)
    np.testing.assert_array_equal(out, np.broadcast_to(cache.values[[0, 2], :, :1], out.shape))


def test_rows_that_are_not_a_sequences_are_never_read(isa):
    cache = filled()
    for array in (cache.keys, cache.values):
        array[cache.block_table(0)[1], :, 1:] = np.nan
        array[cache.block_table(1)[0], :, 3:] = np.inf
        array[cache.reference_counts == 0] = np.nan
    assert np.isfinite(cache.attend(normal(2, HEADS, 3, DIM), [0, 1])).all()


def test_no_sequences_and_no_pages():
    cache = PagedKVCache(0, 4, 1, DIM)
    assert cache.attend(np.ones((0, 2, 1, DIM), np.float32), []).shape == (0, 2, 1, DIM)
    cache.append(np.ones((0, 1, 2, DIM), np.float32), np.ones((0, 1, 2, DIM), np.float32), [])
    cache.free([])
    sequence = cache.allocate()
    cache.append(np.ones((1, 0, DIM), np.float32), np.ones((1, 0, DIM), np.float32), sequence)
    assert not cache.attend(np.ones((2, 1, DIM), np.float32), sequence).any()
    assert cache.block_table(sequence).shape == (0,)


def test_attributes_and_text():
    cache = filled("int8")
    sizes = (cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim, cache.value_dim)
    assert sizes == (6, 4, HEADS, DIM, VALUE_DIM)
    assert cache.nbytes == 6 * 4 * HEADS * (DIM + VALUE_DIM + 8)
    assert (cache.key_scales.shape, cache.value_scales.shape) == ((6, HEADS, 4), (6, HEADS, 4))
    counts = cache.reference_counts
    counts += 1
    assert cache.reference_counts.tolist() == [1, 1, 1, 0, 0, 0]
    text = "<PagedKVCache, 3 of 6 pages in use, of 4 rows of 2 heads, 4 and 3 features in int8>"
    assert repr(cache) == text


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "num_pages must be at least 0, got -1", {"num_pages": -1}),
        (ValueError, "page_size must be at least 1, got 0", {"page_size": 0}),
        (TypeError, "page_size must be an integer, got 4.0", {"page_size": 4.0}),
        (ValueError, "num_kv_heads must be at least 1, got 0", {"num_kv_heads": 0}),
        (TypeError, "dtype must be .*, got float8_e4m3fn", {"dtype": ml_dtypes.float8_e4m3fn}),
        (TypeError, "dtype must be .*, got uint8", {"dtype": np.uint8}),
    ],
)
def test_what_a_cache_cannot_be(error, match, arguments):
    sizes = {"num_pages": 4, "page_size": 4, "num_kv_heads": HEADS, "head_dim": DIM}
    with pytest.raises(error, match=match):
        PagedKVCache(**sizes | arguments)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


K2, V2 = (2, HEADS, 2, DIM), (2, HEADS, 2, VALUE_DIM)
BAD_CALLS = {
    "a dead sequence": (ValueError, "sequences must be allocated and not freed, got 2, which has been freed",
        lambda c: c.append(ones(*K2), ones(*V2), [0, 2])),
    "a sequence that never was": (ValueError, "got 9, which was never allocated",
        lambda c: c.attend(ones(2, HEADS, 1, DIM), [0, 9])),
    "a negative sequence": (ValueError, "got -1, which was never allocated", lambda c: c.lengths(-1)),
    "freeing the dead": (ValueError, "got 2, which has been freed", lambda c: c.free([0, 2])),
    "freeing twice": (ValueError, r"sequences must be different ones, got \[0, 0\]", lambda c: c.free([0, 0])),
    "forking the dead": (ValueError, "got 2, which has been freed", lambda c: c.fork(2)),
    "forking too much": (ValueError, r"length must lie in 0 \.\.\. 5, the sequence's own, got 6",
        lambda c: c.fork(0, 6)),
    "forking less than nothing": (ValueError, "length must be at least 0, got -1", lambda c: c.fork(0, -1)),
    "forking several": (TypeError, r"sequence must be an integer, got \[0\]", lambda c: c.fork([0])),
    "appending to one twice": (ValueError, r"sequences must be different ones, got \[1, 1\]",
        lambda c: c.append(ones(*K2), ones(*V2), [1, 1])),
    "sequences by name": (TypeError, "sequences must be integers, got <U1", lambda c: c.lengths("a")),
    "sequences in two axes": (ValueError, r"sequences must be one integer or have shape \(B,\), got \(1, 2\)",
        lambda c: c.lengths([[0, 1]])),
    "out of pages": (ValueError, "k and v must fit the pages that are free, got rows for 5 more with 3 free",
        lambda c: c.append(ones(2, HEADS, 13, DIM), ones(2, HEADS, 13, VALUE_DIM), [0, 1], [12, 9])),
    "out of pages for the second": (ValueError, "got rows for 4 more with 3 free",
        lambda c: c.append(ones(2, HEADS, 14, DIM), ones(2, HEADS, 14, VALUE_DIM), [0, 1], [3, 14])),
    "k of another dtype": (TypeError, "k must be float32 for a cache of float32, got float64",
        lambda c: c.append(ones(*K2, dtype=np.float64), ones(*V2), [0, 1])),
    "codes": (TypeError, "v must be floats, which an int8 cache quantizes itself, got int8",
        lambda c: c.append(ones(*K2), ones(*V2, dtype=np.int8), [0, 1])),
    "float8": (TypeError, "k must be float32 .* got float8_e4m3fn",
        lambda c: c.append(ones(*K2, dtype=ml_dtypes.float8_e4m3fn), ones(*V2), [0, 1])),
    "heads": (ValueError, r"k must have shape \(2, 2, n, 4\), got \(2, 1, 2, 4\)",
        lambda c: c.append(ones(2, 1, 2, DIM), ones(*V2), [0, 1])),
    "batch for one": (ValueError, r"k must have shape \(2, n, 4\), got \(2, 2, 2, 4\)",
        lambda c: c.append(ones(*K2), ones(*V2), 0)),
    "negative lengths": (ValueError, r"lengths must lie in 0 \.\.\. 2, the rows given, got -2",
        lambda c: c.append(ones(*K2), ones(*V2), [0, 1], [1, -2])),
    "lengths of one": (ValueError, r"lengths must be one integer or have shape \(\), got \(1,\)",
        lambda c: c.append(ones(*K2[1:]), ones(*V2[1:]), 0, [1])),
    "truncate beyond": (ValueError, r"n must lie in 0 \.\.\. 3, the sequence's length, got 4",
        lambda c: c.truncate([0, 1], 4)),
    "truncate below": (ValueError, "n must lie in .*, got -1", lambda c: c.truncate(0, -1)),
    "q for one": (ValueError, r"q must have shape \(H, N, 4\), got \(1, 2, 1, 4\)",
        lambda c: c.attend(ones(1, HEADS, 1, DIM), 0)),
    "q for two": (ValueError, r"q must have shape \(2, H, N, 4\), got \(1, 2, 1, 4\)",
        lambda c: c.attend(ones(1, HEADS, 1, DIM), [0, 1])),
    "heads of q": (ValueError, "q's number of heads must be a multiple of k's, got 3 and 2",
        lambda c: c.attend(ones(3, 1, DIM), 0)),
    "dtype of q": (TypeError, "q, k and v must have the same dtype .*got float64",
        lambda c: c.attend(ones(2, 1, DIM, dtype=np.float64), 0)),
    "kv_lens": (TypeError, "kv_lens must be left out", lambda c: c.attend(ones(2, 1, DIM), 0, kv_lens=3)),
    "block_table": (TypeError, "block_table must be left out",
        lambda c: c.attend(ones(2, 1, DIM), 0, block_table=[0])),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_leave_the_cache_alone(case):
    error, match, call = BAD_CALLS[case]
    cache = filled()
    cache.free(cache.allocate())
    before = state(cache)
    with pytest.raises(error, match=match) as raised:
        call(cache)
    assert "\n" not in str(raised.value)
    assert state(cache) == before


def test_int8_refuses_nan_and_takes_no_page():
    cache = filled("int8")
    before = state(cache)
    k, v = ones(2, HEADS, 9, DIM), ones(2, HEADS, 9, VALUE_DIM)
    v[1, 0, 8, 0] = np.nan
    with pytest.raises(ValueError, match="v must be finite to be quantized, got nan"):
        cache.append(k, v, [0, 1], [1, 9])
    assert state(cache) == before
    cache.append(k, v, [0, 1], [1, 8])
    assert cache.lengths([0, 1]).tolist() == [6, 11]
