"""What a call needs beside its result: a fixed scratch per thread, whatever the options, layouts and types."""

import sys
import textwrap

import pytest
from inputs import output_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HEADS, LENGTH, DIM, THREADS = 16, 4096, 64, 2
LIMIT_MB = 16 * THREADS

# Everything the call gets is written before the measurement, `out` included, and filled head by head, so that the
# high-water mark stands at what is in use. One N x S plane of float32 is 64 MB, a copy of K and V 32 MB.
MEASURE = f"""
import numpy as np
import fastattn

heads, length, dim, threads = {HEADS}, {LENGTH}, {DIM}, {THREADS}
rng = np.random.default_rng(0)

def filled(dtype=np.float32, rows_first=False):
    shape = (1, length, heads, dim) if rows_first else (1, heads, length, dim)
    array = np.empty(shape, dtype)
    view = array.swapaxes(1, 2) if rows_first else array
    for head in range(heads):
        view[0, head] = rng.standard_normal((length, dim), np.float32)
    return view

def peak_kilobytes():  # not ru_maxrss, which a new process begins with its parent's
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

def growth(call):
    before = peak_kilobytes()
    call()
    return (peak_kilobytes() - before) / 1024

def mask_of(*shape):
    return rng.integers(0, 2, shape, np.bool_)

import ml_dtypes
options = {{}}
"""
CASES = {
    "plain": "q, k, v = filled(), filled(), filled()",
    "causal": "q, k, v = filled(), filled(), filled(); options['causal'] = True",
    "window": "q, k, v = filled(), filled(), filled(); options['window'] = (256, 0)",
    "mask of keys": "q, k, v = filled(), filled(), filled(); options['mask'] = mask_of(1, 1, 1, length)",
    "mask of all heads": "q, k, v = filled(), filled(), filled(); options['mask'] = mask_of(1, 1, length, length)",
    "float16 bias": "q, k, v = filled(), filled(), filled(); options['bias'] = np.ones((1, length), np.float16)",
    "rows before heads": "q, k, v = (filled(rows_first=True) for _ in range(3)); options['causal'] = True",
    "grouped": "q, k, v = filled(), filled()[:, ::8], filled()[:, ::8]; options['causal'] = True",
    "float16": "q, k, v = (filled(np.float16) for _ in range(3)); options['causal'] = True",
    "bfloat16": "q, k, v = (filled(ml_dtypes.bfloat16) for _ in range(3)); options['causal'] = True",
}
CALL = """
out = np.ones(q.shape, q.dtype)
x = np.ones((1, 4, 200, 64), np.float32)
fastattn.attention(x, x, x, num_threads=threads)  # starts the worker threads
print(growth(lambda: fastattn.attention(q, k, v, out=out, num_threads=threads, **options)))
assert np.isfinite(out[0, 0, 0].astype(np.float32)).all()
"""


@pytest.mark.parametrize("case", CASES)
def test_memory_of_a_call(case):
    assert float(output_of(MEASURE + CASES[case] + CALL)) < LIMIT_MB


def test_the_measurement_sees_a_matrix_of_scores():
    """Plain NumPy for one head builds what the limit is there to forbid."""
    plain = "q, k = filled(), filled(); print(growth(lambda: q[0, 0] @ k[0, 0].T))"
    assert float(output_of(MEASURE + plain)) > LIMIT_MB


def test_memory_of_many_calls_does_not_grow():
    code = """
    x = np.ones((1, 4, 256, 64), np.float32)

    def calls(count):
        for _ in range(count):
            fastattn.attention(x, x, x, causal=True, return_lse=True, mask=np.ones(256, bool))
            try:
                fastattn.attention(x, x, x, kv_lens=999)
            except ValueError:
                continue

    calls(5)
    print(growth(lambda: calls(100)))
    """
    assert float(output_of(MEASURE + textwrap.dedent(code))) < 4


def test_repeated_calls_fault_in_no_pages():
    """Scratch given back to the system after each call would cost some 40 page faults in the next."""
    code = """
    import resource
    import numpy as np
    import fastattn
    x = np.ones((1, 12, 128, 32), np.float32)
    out = np.ones_like(x)
    faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        fastattn.attention(x, x, x, out=out, num_threads=2)
    before = faults()
    for _ in range(200):
        fastattn.attention(x, x, x, out=out, num_threads=2)
    assert faults() - before < 200, faults() - before
    """
    output_of(code, MALLOC_MMAP_THRESHOLD_="65536")
