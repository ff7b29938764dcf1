"""The largest errors against float64 over the number of keys, as Markdown: python -m benchmarks.accuracy [KEYS ...].

Errors are divided by eps * max|v| of the output's type, so that one unit is at most two units in the last place of the
largest value, whatever the type.
"""

import sys
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from benchmarks.cases import Case, case, make_inputs
from benchmarks.implementations import IMPLEMENTATIONS, Unsupported
from benchmarks.reference import largest_error

KEYS = (16, 1024, 16384)
DTYPES = ("float32", "float16", "bfloat16")
QUERIES = {"prefill": 64, "decode": 1}
COMPARED = ("fastattn", "numpy", "torch")
INTRODUCTION = """\
# Accuracy

<!-- Printed by `python -m benchmarks.accuracy`; changes by hand are lost. -->

Largest error of sampled rows against float64, in units of `eps * max|v|` of the output's type, for normally distributed
queries, keys and values of 64 features (4 heads). It must not grow with the number of keys. NumPy's own row is plain
NumPy in the same type; it has no products of half types.
"""


def cases(keys: Sequence[int]) -> Iterator[tuple[str, str, list[Case]]]:
    """Yield the kind of call, the dtype and one case per number of keys."""
    for kind, n_queries in QUERIES.items():
        for dtype in DTYPES:
            yield kind, dtype, [case(f"{kind}_{n}", "short", H=4, N=n_queries, S=n, D=64, dtype=dtype) for n in keys]


def relative_error(item: Case, name: str) -> float | None:
    """Return the error in units of eps * max|v|, or None where the implementation cannot do the case."""
    inputs = make_inputs(item)
    try:
        call = IMPLEMENTATIONS[name].prepare(item, inputs, 1)
    except Unsupported:
        return None
    largest = float(np.abs(inputs.v.astype(np.float64)).max())
    error = largest_error(item, inputs, call.result(call.run()))
    return error / (largest * float(ml_dtypes.finfo(item.dtype).eps))


def table(keys: Sequence[int]) -> str:
    """Render one row per kind of call, dtype and implementation."""
    lines = ["| call | dtype | implementation | " + " | ".join(f"S = {n}" for n in keys) + " |"]
    lines.append("|:--|:--|:--|" + "--:|" * len(keys))
    for kind, dtype, items in cases(keys):
        for name in COMPARED:
            errors = [relative_error(item, name) for item in items]
            if any(error is not None for error in errors):
                cells = " | ".join("–" if error is None else f"{error:.2g}" for error in errors)
                lines.append(f"| {kind} | {dtype} | {name} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(INTRODUCTION)
    print(table([int(argument) for argument in sys.argv[1:]] or KEYS))
