"""Which pages a sequence is given."""

import numpy as np
import pytest

from fastattn import PagedKVCache
from fastattn._free_pages import ROWS_TOGETHER

PAGE_SIZE = 16
GROUP = ROWS_TOGETHER // PAGE_SIZE


def _rows(n_sequences, n_rows):
    return np.zeros((n_sequences, 1, n_rows, 1), np.float32)


def _cache(num_pages, n_sequences):
    cache = PagedKVCache(num_pages, PAGE_SIZE, 1, 1)
    return cache, [cache.allocate() for _ in range(n_sequences)]


def _grow(cache, sequences, n_rows, step):
    for _ in range(0, n_rows, step):
        cache.append(*2 * (_rows(len(sequences), step),), sequences)


@pytest.mark.parametrize("step", [1, PAGE_SIZE, 40, ROWS_TOGETHER])
def test_pages_of_sequences_that_grow_by_turns_lie_side_by_side(step):
    cache, sequences = _cache(12 * GROUP, 3)
    _grow(cache, sequences, 2 * ROWS_TOGETHER, step)
    for pages in cache.block_table(sequences):
        steps = np.diff(pages[pages >= 0])
        assert (steps[np.arange(1, len(steps) + 1) % GROUP != 0] == 1).all()


def test_a_sequence_alone_has_its_pages_in_order():
    cache, (sequence,) = _cache(3 * GROUP + 5, 1)
    _grow(cache, [sequence], cache.num_pages * PAGE_SIZE, PAGE_SIZE)
    assert np.array_equal(cache.block_table(sequence), np.arange(cache.num_pages))


@pytest.mark.parametrize("num_pages", [1, GROUP - 1, GROUP, 3 * GROUP + 5])
def test_every_page_can_be_had(num_pages):
    cache, sequences = _cache(num_pages, num_pages)
    cache.append(*2 * (_rows(num_pages, 1),), sequences)  # a page for each, in groups that others began
    assert cache.num_free_pages == 0
    assert sorted(cache.block_table(sequences).ravel()) == list(range(num_pages))
    with pytest.raises(ValueError, match="got rows for 1 more with 0 free"):
        cache.append(*2 * (_rows(1, PAGE_SIZE),), sequences[:1])


def test_a_group_is_whole_again_when_its_pages_are_free():
    cache, (first, second) = _cache(2 * GROUP, 2)
    _grow(cache, [first, second], ROWS_TOGETHER, PAGE_SIZE)
    began = cache.block_table(first)[0]
    cache.free(first)
    third = cache.allocate()
    _grow(cache, [third], ROWS_TOGETHER, 1)
    assert np.array_equal(cache.block_table(third), began + np.arange(GROUP))


def test_others_go_on_when_a_neighbour_is_taken():
    cache, (first, second) = _cache(GROUP, 2)
    cache.append(*2 * (_rows(2, 1),), [first, second])  # there is but one group
    _grow(cache, [first], (GROUP - 2) * PAGE_SIZE, PAGE_SIZE)
    assert cache.num_free_pages == 0
    assert 1 not in cache.block_table(first)
    assert cache.block_table(second).tolist() == [1]
