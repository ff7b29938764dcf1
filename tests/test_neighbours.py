"""Beside other libraries with threads of their own in one process: PyTorch, scikit-learn, NumPy's OpenBLAS.

Each has its own OpenMP runtime or thread pool. Whichever is imported first, and whoever calls whom in between,
the results are those that each gives alone, and nobody waits for ever.
"""

import importlib.util

import pytest
from inputs import output_of

NEIGHBOURS = {
    "numpy": """
        def neighbour():
            return (a @ a.T).sum(axis=1)
    """,
    "torch": """
        import torch
        t = torch.from_numpy(a)
        def neighbour():
            return torch.softmax(t @ t.T / 100, dim=-1).sum(dim=0).numpy()
    """,
    "sklearn": """
        from sklearn.metrics import pairwise_distances_argmin_min
        def neighbour():
            return pairwise_distances_argmin_min(a[:500], a[500:])[0]
    """,
}
COMMON = """
    import threading
    import numpy as np

    a = np.random.default_rng(0).standard_normal((1200, 64)).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((2, 4, 260, 32)).astype(np.float32)
"""
OWN = """
        import fastattn
        def own(num_threads=2):
            return fastattn.attention(x, x, x, causal=True, num_threads=num_threads)
"""
INTERLEAVED = """
    mine, theirs = own(1), neighbour()
    for turn in range(30):
        assert np.array_equal(own(1 + turn % 5), mine)
        assert np.array_equal(neighbour(), theirs)

    wrong, done = [], []
    def repeat(function, expected):
        for _ in range(20):
            if not np.array_equal(function(), expected):
                wrong.append(function.__name__)
        done.append(function.__name__)

    threads = [threading.Thread(target=repeat, args=pair) for pair in [(own, mine), (neighbour, theirs)] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert len(done) == 4
    assert np.array_equal(own(3), mine) and np.array_equal(neighbour(), theirs)
"""


@pytest.mark.parametrize("first", ["we", "they"])
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_calls_interleaved(name, first):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    parts = [OWN, NEIGHBOURS[name]] if first == "we" else [NEIGHBOURS[name], OWN]
    code = COMMON + "".join(part.replace("\n    ", "\n") for part in parts) + INTERLEAVED
    output_of(code, timeout=600)
