"""Errors of the caches that NumPy would raise in its own words name the argument, the rule and the value."""

import numpy as np
import pytest

from fastattn import KVCache, PagedKVCache

RAGGED = [[1], [1, 2]]
SIZES = {
    "KVCache": (KVCache, (1, 2, 2**62, 64), "batch, num_kv_heads, capacity and head_dim", f"1 x 2 x {2**62} x 64"),
    "no rows": (KVCache, (2**61, 1, 0, 1), "batch, num_kv_heads, capacity and head_dim", f"{2**61} x 1 x 0 x 1"),
    "just too big": (KVCache, (1, 1, 2**60, 1), "batch, num_kv_heads, capacity and head_dim", f"1 x 1 x {2**60} x 1"),
    "PagedKVCache": (
        PagedKVCache,
        (2**62, 16, 1, 4),
        "num_pages, num_kv_heads, page_size and head_dim",
        f"{2**62} x 1 x 16 x 4",
    ),
}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("q", lambda side, paged: side.attend(RAGGED)),
        ("q", lambda side, paged: paged.attend(RAGGED, [])),
        ("index", lambda side, paged: side.reorder(RAGGED)),
        ("n", lambda side, paged: side.truncate(RAGGED)),
        ("k", lambda side, paged: side.append(RAGGED, RAGGED)),
        ("sequences", lambda side, paged: paged.free(RAGGED)),
    ],
)
def test_ragged_lists_are_named(name, call):
    with pytest.raises(ValueError, match=f"^{name} must be a rectangular array"):
        call(KVCache(2, 1, 8, 4), PagedKVCache(2, 4, 1, 4))


@pytest.mark.parametrize("dtype", [np.int8, np.float64])
@pytest.mark.parametrize("case", SIZES)
def test_sizes_beyond_all_addresses_are_named(case, dtype):
    kind, sizes, names, came = SIZES[case]
    with pytest.raises(ValueError, match=rf"^{names} must make fewer than 2\*\*60 numbers, got {came}$"):
        kind(*sizes, dtype=dtype)


def test_value_dim_beyond_all_addresses_is_named():
    with pytest.raises(ValueError, match=rf"capacity and value_dim must make fewer .* got 1 x 1 x 8 x {2**58}"):
        KVCache(1, 1, 8, 4, value_dim=2**58)


def test_memory_that_there_is_not_is_told_with_its_shape():
    with pytest.raises(MemoryError, match=rf"shape \(1, 1, {2**59}, 1\)"):
        KVCache(1, 1, 2**59, 1, dtype=np.float64)


def test_masks_of_a_paged_cache_are_as_long_as_the_pages():
    cache = PagedKVCache(4, 4, 1, 4)
    sequence = cache.allocate()
    rows = np.ones((1, 6, 4), np.float32)
    cache.append(rows, rows, sequence)
    assert cache.attend(rows[:, :1], sequence, mask=np.ones((1, 8), bool)).shape == (1, 1, 4)
    with pytest.raises(ValueError, match="mask"):
        cache.attend(rows[:, :1], sequence, mask=np.ones((1, 6), bool))
