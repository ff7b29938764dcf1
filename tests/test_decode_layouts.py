"""Decoding with the heads' keys one after another, between one another and in pages: bit for bit the same."""

import numpy as np
import pytest
from checker import assert_attention_close
from inputs import normal, qkv

from fastattn import attention, attention_varlen
from fastattn._quantized import quantize_rows, quantized_attention

pytestmark = pytest.mark.usefixtures("isa")


def _between(x):
    """(B, K, S, ...) in the memory of (B, S, K, ...)."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def _in_pages(x, table, page_size):
    """(B, K, S, ...) as (pages, K, page_size, ...), of which table (B, pages of an entry) tells the order."""
    pool = np.empty((table.size, x.shape[1], page_size, *x.shape[3:]), x.dtype)
    for entry, numbers in enumerate(table):
        for place, number in enumerate(numbers):
            rows = x[entry, :, place * page_size : (place + 1) * page_size]
            pool[number, :, : rows.shape[1]] = rows
    return pool


def _head_by_head(pool):
    return np.ascontiguousarray(pool.swapaxes(0, 1)).swapaxes(0, 1)


def _table(batch, n_keys, page_size):
    n_pages = -(-n_keys // page_size)
    return np.random.default_rng(n_pages).permutation(batch * n_pages).reshape(batch, n_pages)


@pytest.mark.parametrize("dtypes", ["float32", "float64", "float16", "float32-bfloat16"])
@pytest.mark.parametrize("n_kv_heads", [2, 3, 8, 9, 17])
@pytest.mark.parametrize(("group", "n_queries"), [(1, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize("head_dim", [8, 17])
def test_memory_order_of_heads(dtypes, n_kv_heads, group, n_queries, head_dim):
    q, k, v = qkv(2, n_kv_heads * group, n_kv_heads, n_queries, 1100, head_dim, 5, dtypes=dtypes)
    v[1, -1, 700] = np.inf  # the sums of one head are made twice
    lengths = np.array([1100, 1001])
    mask = normal(1100) > -1
    mask[700] = False
    options = {"kv_lens": lengths, "causal": True, "return_lse": True}
    expected = attention(q, k, v, mask=mask, num_threads=1, **options)
    assert_attention_close(expected, q, k, v, mask=mask, **options)
    for threads in (1, 2, 3):
        actual = attention(q, _between(k), _between(v), mask=mask, num_threads=threads, **options)
        assert all(map(np.array_equal, actual, expected))
    for page_size in (1, 16, 100):
        table = _table(2, 1100, page_size)
        mask_of_pages = np.concatenate([mask, np.ones(table.shape[1] * page_size - 1100, bool)])
        pools = [_in_pages(x, table, page_size) for x in (k, v)]
        for arrange in (np.asarray, _head_by_head):
            actual = attention(
                q, *map(arrange, pools), mask=mask_of_pages, block_table=table, num_threads=2, **options
            )  # fmt: skip
            assert all(map(np.array_equal, actual, expected))


@pytest.mark.parametrize("n_kv_heads", [2, 9])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("head_dim", [8, 17])
def test_memory_order_of_quantized_heads(n_kv_heads, group, head_dim):
    q, k, v = qkv(2, n_kv_heads * group, n_kv_heads, 1, 1100, head_dim, 5)
    parts = *quantize_rows(k), *quantize_rows(v)
    options = {"kv_lens": np.array([1100, 1001]), "window": (1000, 0)}
    expected = quantized_attention(q, *parts, num_threads=1, **options)
    assert np.array_equal(quantized_attention(q, *map(_between, parts), num_threads=2, **options), expected)
    for page_size in (1, 16, 100):
        table = _table(2, 1100, page_size)
        pages = [_in_pages(part, table, page_size) for part in parts]
        for arrange in (np.asarray, _head_by_head):
            actual = quantized_attention(q, *map(arrange, pages), block_table=table, num_threads=2, **options)
            assert np.array_equal(actual, expected)


@pytest.mark.parametrize("page_size", [5, 16, 64, 200])
@pytest.mark.parametrize("dtypes", ["float32", "float64", "float16", "float32-bfloat16"])
def test_some_heads_of_pages_read_together(dtypes, page_size):
    """Of seven heads all, some or one at a time, and what is left."""
    q, k, v = qkv(1, 14, 7, 1, 300, 128, 40, dtypes=dtypes)
    table = _table(1, 300, page_size)
    actual = attention(q, *(_in_pages(x, table, page_size) for x in (k, v)), block_table=table, kv_lens=np.array([300]))
    assert np.array_equal(actual, attention(q, k, v))


def test_some_heads_of_quantized_pages_read_together():
    """Of seven heads two at a time."""
    q, k, v = qkv(1, 7, 7, 1, 300, 1024, 1024)
    parts = *quantize_rows(k), *quantize_rows(v)
    table = _table(1, 300, 16)
    pages = [_in_pages(part, table, 16) for part in parts]
    actual = quantized_attention(q, *pages, block_table=table, kv_lens=np.array([300]))
    assert np.array_equal(actual, quantized_attention(q, *parts))


def test_memory_order_of_packed_sequences():
    """The rows of (T, K, D) lie between one another too."""
    q, k, v = normal(3, 18, 8), normal(1500, 9, 8, seed=1), normal(1500, 9, 8, seed=2)
    bounds = np.array([0, 1, 2, 3]), np.array([0, 300, 301, 1500])
    packed = attention_varlen(q, k, v, *bounds)
    for i in range(3):
        rows = slice(bounds[1][i], bounds[1][i + 1])
        alone = attention(q[i : i + 1].swapaxes(0, 1), *(np.ascontiguousarray(x[rows].swapaxes(0, 1)) for x in (k, v)))
        assert np.array_equal(packed[i : i + 1].swapaxes(0, 1), alone)


@pytest.mark.parametrize("dtypes", ["float32", "float64", "float32-float16"])
@pytest.mark.parametrize("head_dim", [8, 320])  # heads of large rows are summed one by one
def test_heads_that_see_other_keys_than_their_neighbours(dtypes, head_dim):
    q, k, v = qkv(1, 4, 4, 1, 520, head_dim, 8, dtypes=dtypes)
    mask = normal(4, 1, 520) > -1
    mask[0, :, 64:256] = False  # whole blocks
    mask[1] = False
    mask[2] = True
    v[0, 0, 100], v[0, 2, 300] = np.nan, np.inf  # hidden from the first head, seen by the third
    expected = attention(q, k, v, mask=mask)
    assert_attention_close(expected, q, k, v, mask=mask)
    assert np.array_equal(attention(q, _between(k), _between(v), mask=mask), expected, equal_nan=True)
    table = _table(1, 520, 8)
    pools = [_in_pages(x, table, 8) for x in (k, v)]
    actual = attention(q, *pools, mask=mask, block_table=table, kv_lens=np.array([520]))
    assert np.array_equal(actual, expected, equal_nan=True)


@pytest.fixture
def either_cache(isa):
    """Decoding brings memory into the second-level cache, then into the first one, where a level does both."""
    usual = isa.decodes_into_first_level()

    def settings():
        for first_level in (False, True):
            assert isa.decodes_into_first_level(first_level) == (first_level if isa.isa == "avx512_bf16" else usual)
            yield first_level

    yield settings
    isa.decodes_into_first_level(usual)


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("head_dim", [17, 75])
@pytest.mark.parametrize("dtypes", ["float32", "float64", "float16", "bfloat16", "float32-bfloat16"])
def test_either_cache(either_cache, dtypes, head_dim, group):
    q, k, v = qkv(1, 2 * group, 2, 1, 1101, head_dim, 40, dtypes=dtypes)
    v[0, 1, 1100] = np.inf  # of a part of a register, and sums that are made twice
    table = _table(1, 1101, 30)
    pages = [_in_pages(x, table, 30) for x in (k, v)]
    results = []
    for _ in either_cache():
        results += [attention(q, k, v), attention(q, *pages, block_table=table, kv_lens=np.array([1101]))]
    assert_attention_close(results[0], q, k, v)
    assert all(np.array_equal(result, results[0], equal_nan=True) for result in results)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_either_cache_for_quantized_keys(either_cache, group):
    q, k, v = qkv(1, 2 * group, 2, 1, 1101, 75, 40)
    parts = *quantize_rows(k), *quantize_rows(v)
    results = [quantized_attention(q, *parts) for _ in either_cache()]
    assert np.array_equal(*results)
