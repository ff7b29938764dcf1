"""What options, types and layouts cost, as Markdown: python -m benchmarks.costs [--threads N] [--seconds S] [--smoke].

Each variant takes turns with the plain float32 call of the same size, so that the machine's moods meet both; the ratio
is the median over turns. Speed cliffs, where a legal option makes a call many times slower, are a known fault of
attention libraries: pytorch/pytorch#146508, microsoft/onnxruntime#29655, ggml-org/llama.cpp#7154.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

import fastattn
import fastattn.reference
from benchmarks.cases import TOLERANCE
from benchmarks.implementations._numpy import attention as plain_numpy

INTRODUCTION = """\
# What an option costs

<!-- Printed by `python -m benchmarks.costs`; changes by hand are lost. -->

Time of a call with the option, type or layout, divided by that of the plain contiguous float32 call of the same size
(H = 12, D = 64, median of alternating calls); below 1 it saves time.
"""
HEADS, DIM = 12, 64
Call = partial  # of a function of q, k, v and options


def variants(n: int) -> Iterator[tuple[str, Call]]:
    """Yield names and calls at N = S = n; the first is the plain call."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, HEADS, n, DIM), dtype=np.float32) for _ in range(3))
    call = partial(fastattn.attention, q, k, v)
    yield "plain", call
    shown, some = np.ones((n, n), bool), random.random((n, n)) < 0.7
    numbers = random.standard_normal((n, n), dtype=np.float32)
    yield "bool mask that hides nothing", partial(call, mask=shown)
    yield "bool mask, 30 % hidden at random", partial(call, mask=some)
    yield "float mask of zeros", partial(call, mask=np.zeros((n, n), np.float32))
    yield "float mask of random numbers", partial(call, mask=numbers)
    yield "float mask, 30 % −inf at random", partial(call, mask=np.where(some, 0, -np.inf).astype(np.float32))
    by_head = np.repeat(some[None], HEADS, axis=0)
    yield "bool mask per head, hiding nothing", partial(call, mask=np.ones_like(by_head))
    yield "bool mask per head", partial(call, mask=by_head)
    yield "float mask per head", partial(call, mask=np.repeat(numbers[None], HEADS, axis=0))
    yield "causal", partial(call, causal=True)
    yield "window of 256", partial(call, window=(256, 0))
    yield "softcap", partial(call, softcap=30.0)
    yield "ALiBi", partial(call, alibi_slopes=np.linspace(0.5, 0.01, HEADS))
    yield "log-sum-exp", partial(call, return_lse=True)
    for name, dtype in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        yield name, partial(fastattn.attention, *(array.astype(dtype) for array in (q, k, v)))
    yield "heads beside features (B, N, H, D)", partial(fastattn.attention, *(_heads_last(a) for a in (q, k, v)))
    wide = [np.ascontiguousarray(np.pad(a, [(0, 0)] * 3 + [(0, 1)])) for a in (q, k, v)]
    yield "D = 65", partial(fastattn.attention, *wide)
    yield "most weights below 1e-38", partial(fastattn.attention, q * 40, k, v)
    yield "plain NumPy", partial(plain_numpy, q, k, v, None)


def _heads_last(array: NDArray) -> NDArray:
    return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)


def check(call: Call) -> None:
    """Raise ValueError unless the call's result is that of the reference: a wrong result is not timed."""
    results = (call(), fastattn.reference.attention(*call.args[:3], **call.keywords))
    got, want = (np.asarray(r[0] if isinstance(r, tuple) else r).astype(np.float64) for r in results)
    error = float(np.abs(got - want).max())
    if not error <= TOLERANCE[str(np.asarray(call.args[0]).dtype)]:
        raise ValueError(f"{call} is off by {error}")


def ratio_by_turns(plain: Callable[[], object], call: Callable[[], object], seconds: float) -> float:
    """Return the median over turns of the time of `call` divided by that of `plain`."""
    turns: list[float] = []
    end = time.perf_counter() + seconds
    while not turns or time.perf_counter() < end:
        times = []
        for timed in (plain, call):
            start = time.perf_counter()
            timed()
            times.append(time.perf_counter() - start)
        turns.append(times[1] / times[0])
    return float(np.median(turns))


def ratios(n: int, seconds: float) -> dict[str, float]:
    """Return the median ratio of each variant's time to the plain call's."""
    (_, plain), *others = variants(n)
    check(plain)
    found = {}
    for name, call in others:
        check(call)
        found[name] = ratio_by_turns(plain, call, seconds)
    return found


def table(sizes: tuple[int, ...], seconds: float) -> str:
    """Render one row per variant, one column per size."""
    columns = [ratios(n, seconds) for n in sizes]
    lines = ["| | " + " | ".join(f"N = {n}" for n in sizes) + " |", "|:--|" + "--:|" * len(sizes)]
    lines += [f"| {name} | " + " | ".join(f"{c[name]:.2f}" for c in columns) + " |" for name in columns[0]]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="per variant and size")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one turn")
    arguments = parser.parse_args()
    fastattn.set_num_threads(arguments.threads)
    sizes, seconds = ((16, 40), 0.0) if arguments.smoke else ((256, 1024), arguments.seconds)
    print(INTRODUCTION)
    with threadpool_limits(arguments.threads):
        print(table(sizes, seconds))
