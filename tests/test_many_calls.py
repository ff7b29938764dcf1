"""Mixed calls, right and wrong ones: from sixteen Python threads at once, and twenty thousand in a row."""

import sys
import threading
from pathlib import Path

import pytest
from inputs import output_of
from random_calls import draw_call, outcome, same, seeded

import fastattn

N_THREADS = 16


def test_sixteen_threads_get_what_one_gets():
    """Bit for bit, errors and their texts included, while the number of threads keeps changing."""
    seeds = range(0, 240)
    fastattn.set_num_threads(1)
    serial = [outcome(draw_call(seeded(seed))) for seed in seeds]
    assert {isinstance(result, str) for result in serial} == {True, False}
    barrier, stop = threading.Barrier(N_THREADS + 1), threading.Event()
    wrong, done = [], []

    def work(thread):
        barrier.wait()
        for turn in range(60):
            seed = (17 * thread + 7 * turn) % len(seeds)
            call = draw_call(seeded(seed))
            if not same(outcome(call), serial[seed]):
                wrong.append((seed, call.name))
        done.append(thread)

    def change_num_threads():
        barrier.wait()
        while not stop.is_set():
            for count in (1, 4, 2, None, 7):
                fastattn.set_num_threads(count)
                stop.wait(0.001)

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(N_THREADS)]
    changer = threading.Thread(target=change_num_threads)
    for thread in (*workers, changer):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    changer.join()
    fastattn.set_num_threads(None)
    assert not wrong
    assert len(done) == N_THREADS


MANY_CALLS = """
    import collections, gc, sys
    import numpy as np
    sys.path.insert(0, sys.argv[1])
    from random_calls import draw_call, outcome, seeded

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def small(call):  # the time of 20,000 calls is that of their arithmetic
        return sum(x.size if isinstance(x, np.ndarray) else 0 for x in call.arguments) < 6000

    calls = [call for seed in range(3000) if small(call := draw_call(seeded(seed)))][:500]
    assert len(calls) == 500
    refused, kept = collections.Counter(), []

    def all_of_them():
        for call in calls:
            result = outcome(call)
            refused[isinstance(result, str)] += 1
            if sys.argv[2] == "leaking":
                kept.append(bytearray(100))

    for _ in range(3):
        all_of_them()
    before = resident()
    for _ in range(40):
        all_of_them()
    grown = resident() - before
    assert refused[True] > 4000 and refused[False] > 10000, refused
    print(grown)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["sound", "leaking"])
def test_twenty_thousand_calls_keep_no_memory(kind):
    """Less than 1 MB in all; the same run that keeps 100 bytes of each call shows that it would be seen."""
    grown = int(output_of(MANY_CALLS, Path(__file__).parent, kind, timeout=1200))
    assert (grown < 1 << 20) == (kind == "sound"), grown
