"""What the tests feed in: seeded arrays, the dtypes of a call, fresh interpreters."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np

import fastattn

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# What q, and what k and v are stored in.
DTYPES = {
    "float32": (np.float32, np.float32),
    "float64": (np.float64, np.float64),
    "float16": (np.float16, np.float16),
    "bfloat16": (BFLOAT16, BFLOAT16),
    "float32-float16": (np.float32, np.float16),
    "float32-bfloat16": (np.float32, BFLOAT16),
}


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def qkv(batch=2, heads=4, kv_heads=2, queries=5, keys=37, dim=8, value_dim=None, dtypes="float32", seed=0):
    """Seeded q (batch, heads, queries, dim), k (batch, kv_heads, keys, dim), v (batch, kv_heads, keys, value_dim)."""
    q_dtype, kv_dtype = DTYPES[dtypes]
    return (
        normal(batch, heads, queries, dim, dtype=q_dtype, seed=seed),
        normal(batch, kv_heads, keys, dim, dtype=kv_dtype, seed=seed + 1),
        normal(batch, kv_heads, keys, dim if value_dim is None else value_dim, dtype=kv_dtype, seed=seed + 2),
    )


def run_python(code, *arguments, timeout=120, path=None, cwd=None, **environment):
    """Run code in a fresh interpreter that finds fastattn (at `path`, or this one). None removes a variable."""
    variables = dict(os.environ)
    found = [str(path or Path(fastattn.__file__).parents[1]), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, found))
    for name, value in environment.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=variables, cwd=cwd)


def output_of(code, *arguments, **options):
    """What code prints, in a fresh interpreter that must succeed."""
    result = run_python(code, *arguments, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
