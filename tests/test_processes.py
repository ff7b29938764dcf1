"""Children made in every way by a parent that has computed with threads, and how they and it end.

Bare `os.fork` is in test_threads.py and test_reports_runtime.py; here are multiprocessing's three ways.
"""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastattn

# A module of its own, because `spawn` and `forkserver` import it in the child.
PROGRAM = """
import multiprocessing
import sys
import threading
import warnings

import numpy as np
import fastattn

warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is what is tested
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 4, 150, 32)).astype(np.float32) for _ in range(3))


def results(_=None):
    return [fastattn.attention(q, k, v, causal=True, num_threads=n) for n in (None, 1, 2, 5)]


def right(expected):
    return all(np.array_equal(result, expected) for result in results())


def child(context, expected, depth, queue):
    good = right(expected)
    if depth:
        good = good and descendants(context, expected, depth - 1)
    queue.put(good)


def descendants(context, expected, depth):
    queue = context.Queue()
    process = context.Process(target=child, args=(context, expected, depth, queue))
    process.start()
    good = queue.get(timeout=100)
    process.join(100)
    return good and process.exitcode == 0


def pool_of_four(context, expected):
    with context.Pool(4) as pool:
        return all(np.array_equal(out, expected) for outs in pool.map(results, range(8)) for out in outs)


def main(method, way):
    context = multiprocessing.get_context(method)
    expected = fastattn.attention(q, k, v, causal=True, num_threads=2)
    outcome = []
    ways = {
        "child": lambda: outcome.append(descendants(context, expected, 0)),
        "grandchild": lambda: outcome.append(descendants(context, expected, 1)),
        "pool of four": lambda: outcome.append(pool_of_four(context, expected)),
    }
    thread = threading.Thread(target=ways[way])
    thread.start()  # not from the main thread
    thread.join()
    ways[way]()
    assert outcome == [True, True], outcome
    assert right(expected)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize("way", ["child", "grandchild", "pool of four"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_children_compute_right_and_end(method, way, tmp_path):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip("not a way to start processes here")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parents[1])}
    command = [sys.executable, str(program), method, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
