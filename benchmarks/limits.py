"""How fast this machine could go: a plain matrix product, or a plain read of the same bytes.

Both are measured in the process that measures the implementations, with the same threads, next to the case they limit.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.cases import Case

MATRIX_SIZE = 2048
REPEATS = 5


@dataclass(frozen=True)
class Limit:
    """A rate per second, of floating-point operations or of bytes, and the operation that reached it."""

    rate: float
    operation: str


def measure_limit(case: Case, *, smoke: bool = False) -> Limit:
    """Measure what bounds `case`: bytes read when one query meets many keys, arithmetic otherwise."""
    if case.memory_bound:
        return read_limit(case.kv_bytes)
    # Half types are multiplied in float32 here as everywhere: NumPy has no fast half product to compare with.
    dtype = "float64" if case.dtype == "float64" else "float32"
    return product_limit(dtype, 64 if smoke else MATRIX_SIZE)


def product_limit(dtype: str, size: int) -> Limit:
    """Time NumPy's own `a @ b` of two square matrices."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((size, size)).astype(dtype) for _ in range(2))
    return Limit(2 * size**3 / _median_seconds(lambda: a @ b), f"{dtype} a @ b, {size} x {size}")


def read_limit(n_bytes: int) -> Limit:
    """Time plain reads of `n_bytes`: NumPy's `x.dot(x)` and, where installed, PyTorch's sum; the faster one counts."""
    x = np.ones(max(n_bytes // 4, 1), dtype=np.float32)  # written once: untouched pages would all be one page of zeros
    readers: dict[str, Callable[[], object]] = {"NumPy x.dot(x)": lambda: x.dot(x)}
    if importlib.util.find_spec("torch") is not None:
        import torch

        readers["PyTorch sum"] = torch.from_numpy(x).sum
    seconds, operation = min((_median_seconds(read), name) for name, read in readers.items())
    return Limit(x.nbytes / seconds, f"{operation}, {x.nbytes} bytes")


def _median_seconds(function: Callable[[], object]) -> float:
    function()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
