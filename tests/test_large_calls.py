"""Calls that exceed the caches, whose rows are brought nearer: bit for bit what small calls give, entry by entry."""

import itertools

import numpy as np
import pytest
from checker import assert_attention_close
from inputs import normal
from test_invariants import same

from fastattn import attention, attention_varlen

pytestmark = pytest.mark.usefixtures("isa")

LARGE = 8 << 20  # bytes, see src/ahead.pxi
BATCH = 12


def exceeds(*arrays):
    return sum(array.nbytes for array in arrays) > LARGE


def views(array):
    """The same numbers, of which each head's rows lie apart."""
    return array.swapaxes(1, 2).copy().swapaxes(1, 2)


@pytest.mark.parametrize("arrange", [np.asarray, views])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": np.tri(150, 170, 40, bool)}, {"window": (9, 9)}])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_entry_by_entry(dtype, options, threads, arrange):
    # 150 queries by two heads are no whole number of panels, and 66 features no whole number of lines.
    heads = 32 // np.dtype(dtype).itemsize
    q = arrange(normal(BATCH, 2 * heads, 150, 66, dtype=dtype))
    k, v = (arrange(normal(BATCH, heads, 170, dim, dtype=dtype, seed=dim)) for dim in (66, 34))
    assert exceeds(q, k, v)
    out = attention(q, k, v, num_threads=threads, **options)
    for entry in range(0, BATCH, 5):
        mine = slice(entry, entry + 1)
        small = attention(q[mine, :2], k[mine, :1], v[mine, :1], **options)
        assert same(out[mine, :2], small)
    assert_attention_close(out[:1, :2], q[:1, :2], k[:1, :1], v[:1, :1], **options)


@pytest.mark.parametrize("threads", [1, 2])
def test_entries_of_any_length(threads):
    # Between entries of many queries lie empty ones and some of a single query, which are decoded.
    lengths = [300, 0, 1, 500, 1, 0, 0, 33, 900, 0]
    bounds = np.cumsum([0, *lengths])
    q, k, v = (normal(bounds[-1], 8, 64, seed=seed) for seed in range(3))
    assert exceeds(*(normal(len(lengths), max(lengths), 8, 64) for _ in "qkv"))
    out = attention_varlen(q, k, v, bounds, bounds, causal=True, num_threads=threads)
    for first, last in itertools.pairwise(bounds):
        one = (x[first:last].swapaxes(0, 1)[None] for x in (q, k, v))
        assert same(out[first:last], attention(*one, causal=True)[0].swapaxes(0, 1))
