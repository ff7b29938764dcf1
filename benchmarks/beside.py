"""Whether this library and a neighbour with threads of its own slow each other down for good.

``python -m benchmarks.beside`` prints, for PyTorch, scikit-learn and OpenBLAS: milliseconds per call alone, in turns
and alone again. In turns, threads that still spin after a call may cost the other some; afterwards nothing must be
left of it.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import fastattn

Function = Callable[[], Any]


def _neighbour(name: str) -> Function:
    a = np.random.default_rng(0).standard_normal((1500, 64)).astype(np.float32)
    if name == "torch":
        import torch

        t = torch.from_numpy(a)
        return lambda: torch.softmax(t @ t.T, dim=-1)
    if name == "sklearn":
        from sklearn.metrics import pairwise_distances_argmin_min

        return lambda: pairwise_distances_argmin_min(a[:500], a[500:])
    return lambda: a @ a.T


def _milliseconds(*functions: Function, repeat: int = 60) -> list[float]:
    """The median time of each function, called in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeat):
        for function, taken in zip(functions, times, strict=True):
            began = time.perf_counter()
            function()
            taken.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(taken) for taken in times]


def main() -> None:
    x = np.random.default_rng(1).standard_normal((1, 8, 400, 64)).astype(np.float32)

    def own() -> Any:
        return fastattn.attention(x, x, x)

    print(f"{'':10}{'before':>18}{'in turns':>18}{'after':>18}   ms per call: ours, theirs")
    for name in ("numpy", "torch", "sklearn"):
        if importlib.util.find_spec(name) is None:
            print(f"{name:10} is not installed")
            continue
        theirs = _neighbour(name)
        _milliseconds(own, theirs, repeat=5)
        alone = [*_milliseconds(own), *_milliseconds(theirs)]
        turns = _milliseconds(own, theirs)
        after = [*_milliseconds(own), *_milliseconds(theirs)]
        print(f"{name:10}" + "".join(f"{pair[0]:9.2f}{pair[1]:9.2f}" for pair in (alone, turns, after)))


if __name__ == "__main__":
    main()
