"""Memory that cannot be had: MemoryError before anything is written, or fewer threads; the process lives."""

import sys
import textwrap

import pytest
from inputs import output_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space, reads /proc")

SCRIPT = """
import pathlib, resource, sys
import ml_dtypes
import numpy as np
from fastattn import *

bf16 = ml_dtypes.bfloat16

def limit_memory(megabytes):  # to so much more than is in use
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    size = int(next(line for line in lines if line.startswith("VmSize")).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + int(megabytes * 2**20), -1))

def row(shape, dtype=np.float32):
    return np.broadcast_to(np.ones((), dtype), shape)

x = np.ones((1, 4, 400, 64), np.float32)
"""

# Arrays that are one number in memory, with so many features that the scratch of one thread is gigabytes.
WIDE = 2**24
SCRATCH = {
    "many queries": "attention(row((32, D)), row((9, D)), row((9, 2)), out=out, **o)",
    "many queries, float64": "attention(*[row((9, D), 'f8')] * 2, row((9, 2), 'f8'), causal=True, out=out, **o)",
    "many queries, float16": "attention(*[row((9, D), 'f2')] * 2, row((9, 2), 'f2'), out=out, **o)",
    "few queries": "attention(row((1, 1, 1, 8 * D)), row((1, 1, 9, 8 * D)), row((1, 1, 9, 2)), out=out, **o)",
    "few queries, bfloat16": "attention(row((2, 8 * D), bf16), row((9, 8 * D), bf16), row((9, 2), bf16), out=out, **o)",
    "a mask": "attention(row((32, D)), row((9, D)), row((9, 2)), mask=row((32, 9), bool), out=out, **o)",
    "packed": "attention_varlen(row((32, 1, D)), row((9, 1, D)), row((9, 1, 2)), [0, 32], [0, 9], out=out, **o)",
    "side by side": "multi_head_attention(row((32, 2 * D)), row((9, 2 * D)), row((9, 4)), 2, out=out, **o)",
}
OUT = {  # shape, and a value of its type
    "many queries": "(32, 2), np.float32(7)",
    "many queries, float64": "(9, 2), 7.0",
    "many queries, float16": "(9, 2), np.float16(7)",
    "few queries": "(1, 1, 1, 2), np.float32(7)",
    "few queries, bfloat16": "(2, 2), np.array(7, bf16)",
    "a mask": "(32, 2), np.float32(7)",
    "packed": "(32, 1, 2), np.float32(7)",
    "side by side": "(32, 4), np.float32(7)",
}
RESULTS = {
    "the common call": "attention(row((1, 8, D, 64)), row((1, 8, 9, 64)), row((1, 8, 9, 64)))",
    "with options": "attention(row((1, 8, D, 64)), row((1, 8, 9, 64)), row((1, 8, 9, 64)), causal=True)",
    "log-sum-exp": "attention(row((1, 64, D, 1)), row((1, 64, 9, 1)), row((1, 64, 9, 0)), return_lse=True)",
    "packed": "attention_varlen(row((D, 8, 64)), row((9, 8, 64)), row((9, 8, 64)), [0, D], [0, 9])",
    "side by side": "multi_head_attention(row((D, 512)), row((9, 512)), row((9, 512)), 8)",
    "torch": "scaled_dot_product_attention(row((1, 8, D, 64)), row((1, 8, 9, 64)), row((1, 8, 9, 64)))",
    "linear": "linear_attention(row((8, D, 64)), row((8, 9, 64)), row((8, 9, 64)))",
    "self-attention": "mhsa_forward(row((D, 64)), row((64, 192)))",
    "merging": "merge_states([row((D, 64)), row((D, 64))], [row((D,)), row((D,))])",
}


def run(code, *arguments):
    return output_of(SCRIPT + textwrap.dedent(code), *arguments)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", SCRATCH)
def test_no_memory_for_scratch(name, threads):
    code = f"""
    D = {WIDE}
    out, o = np.full({OUT[name]}), {{"num_threads": int(sys.argv[1])}}
    attention(x, x, x, num_threads=2)
    limit_memory(64)
    try:
        {SCRATCH[name]}
    except MemoryError as error:
        print(error)
    assert (out == 7).all()
    assert (attention(x, x, x, num_threads=2) == 1).all()
    """
    assert "bytes of scratch" in run(code, threads)


def test_keys_without_end_take_no_scratch_of_their_own():
    """The states of a divided cache's chunks have a bound, beyond which it is not divided."""
    code = """
    attention(x, x, x, num_threads=2)
    limit_memory(64)
    keys = row((2**30, 4))
    assert (attention(row((2, 4)), keys, keys, window=(5, 0), num_threads=2) == 1).all()
    print("done")
    """
    assert run(code) == "done"


@pytest.mark.parametrize("name", RESULTS)
def test_no_memory_for_the_result(name):
    code = f"""
    D = 2**22
    limit_memory(64)
    try:
        {RESULTS[name]}
    except MemoryError:
        print("refused")
    assert (attention(x, x, x, num_threads=1) == 1).all()
    """
    assert run(code) == "refused"


@pytest.mark.parametrize("megabytes", [0.5, 2, 4, 7, 8.5, 12, 20, 40])
def test_no_memory_for_threads(megabytes):
    """OpenMP ends the process when it cannot start a thread: the call must see that before, and use fewer."""
    code = """
    limit_memory(float(sys.argv[1]))
    try:
        assert (attention(x, x, x, num_threads=4) == 1).all()
    except MemoryError:
        assert float(sys.argv[1]) < 8  # for the result and the scratch of four
    print("alive")
    """
    assert run(code, megabytes) == "alive"
