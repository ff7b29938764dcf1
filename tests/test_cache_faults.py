"""Calls that run out of memory or are interrupted, wherever they are: the cache is as before, or as after the call."""

import contextlib
import gc
import signal
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from caches import DTYPES, rows_for
from inputs import normal

import fastattn
from fastattn import KVCache, PagedKVCache

FOLDER = str(Path(fastattn.__file__).parent)
HEADS, DIM = 2, 4
# Their last lines hold no place where an interrupt may come, which a tracer does not know.
INDIVISIBLE = {"commit", "add"}


def seen(cache):
    """All that a user can see of a cache."""
    if isinstance(cache, KVCache):
        q = normal(len(cache.lengths), HEADS, 1, DIM)
        return [cache.lengths.tolist(), cache.attend(q).tolist()]
    numbers = cache.sequences
    out = cache.attend(normal(len(numbers), HEADS, 1, DIM), numbers).tolist()
    table, lengths = cache.block_table(numbers).tolist(), cache.lengths(numbers).tolist()
    return [numbers, lengths, table, cache.reference_counts.tolist(), cache.num_free_pages, out]


def rows(n_sequences, n, seed=5):
    return rows_for((n_sequences,), HEADS, n, DIM, DIM, np.float32, seed)


def paged(dtype):
    """Sequences 0, 1 and 4 share a page that only they use, and 4 has the fewest rows of it; 3 was freed."""
    cache = PagedKVCache(12, 4, HEADS, DIM, dtype=DTYPES[dtype][0])
    numbers = [cache.allocate(), cache.fork(cache.allocate())]
    cache.append(*rows(2, 7), numbers, [7, 5])
    cache.free(cache.fork(0))
    cache.truncate(2, 2)
    cache.fork(0, 6)
    cache.append(*rows(1, 3), [cache.fork(0, 5)])
    return cache


def contiguous(dtype):
    cache = KVCache(3, HEADS, 8, DIM, dtype=DTYPES[dtype][0])
    cache.append(*rows(3, 5), [5, 3, 4])
    return cache


CALLS = {
    "append": (paged, lambda c: c.append(*rows(3, 3), [0, 4, 2], [3, 1, 2])),
    "append in every sequence": (paged, lambda c: c.append(*rows(5, 2), c.sequences)),
    "fork": (paged, lambda c: c.fork(0, 6)),
    "truncate": (paged, lambda c: c.truncate([0, 2], [3, 0])),
    "free": (paged, lambda c: c.free([0, 4, 2])),
    "allocate": (paged, lambda c: c.allocate()),
    "append side by side": (contiguous, lambda c: c.append(*rows(3, 3), [1, 3, 2])),
    "reorder": (contiguous, lambda c: c.reorder([2, 0, 2])),
    "truncate side by side": (contiguous, lambda c: c.truncate([2, 3, 0])),
    "reset": (contiguous, lambda c: c.reset()),
}


def fail_at(step, error, call):
    """Raise at that line of the library, counted as they are run; return whether there was one."""
    count = 0

    def local(frame, event, _argument):
        nonlocal count
        if event == "line":
            count += 1
            if count == step:
                raise error
        return local

    def tracer(frame, _event, _argument):
        inside = frame.f_code.co_filename.startswith(FOLDER) and frame.f_code.co_name not in INDIVISIBLE
        return local if inside else None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    except error:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("case", CALLS)
def test_an_exception_at_any_line_changes_nothing(case, dtype, error):
    make, call = CALLS[case]
    complete, cache = make(dtype), make(dtype)
    call(complete)
    before, step = seen(cache), 1
    while fail_at(step, error, lambda: call(cache)):
        assert seen(cache) == before
        step += 1
    assert step > 1
    assert seen(cache) == seen(complete)  # whatever the failures have left behind


@pytest.mark.parametrize("part", range(4))
def test_a_copy_of_a_page_that_fails_changes_nothing(part):
    class Broken(np.ndarray):
        def __setitem__(self, index, value):
            raise MemoryError

    cache = paged("int8")
    before, parts = seen(cache), cache._keys + cache._values
    broken = (*parts[:part], parts[part].view(Broken), *parts[part + 1 :])
    cache._keys, cache._values = broken[:2], broken[2:]
    with pytest.raises(MemoryError):
        cache.append(*rows(5, 2), cache.sequences)
    cache._keys, cache._values = parts[:2], parts[2:]
    assert seen(cache) == before


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an interval timer")
@pytest.mark.parametrize("case", CALLS)
def test_an_interrupt_leaves_no_half_of_a_call(case):
    assert threading.current_thread() is threading.main_thread()
    make, call = CALLS[case]
    complete = make("float32")
    call(complete)
    allowed = [seen(make("float32")), seen(complete)]

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # callbacks of the garbage collector, such as hypothesis', are not to meet the interrupt
    try:
        for microseconds in range(1, 301):
            cache = make("float32")
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * microseconds)
                call(cache)
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert seen(cache) in allowed
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


def test_pages_that_are_not_used_take_no_memory():
    tracemalloc.start()
    try:
        cache = PagedKVCache(10**6, 1, 1, 1)
        arrays = cache.nbytes + 8 * cache.num_pages  # which the system provides as they are written
        assert tracemalloc.get_traced_memory()[1] < arrays + 10**5
    finally:
        tracemalloc.stop()
