"""Thread counts, fixed before NumPy loads its BLAS.

BLAS and OpenMP libraries read their variables once, while they are being loaded; later changes are ignored. This module
therefore imports nothing but the standard library, and `benchmarks/conftest.py` calls it before anything else.
"""

import argparse
import os
from collections.abc import Mapping, Sequence

COUNT_VARIABLES = (
    "FASTATTN_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# Both change which kernels OpenBLAS runs; a comparison must be with what a user gets.
TUNING_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def pinned_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return `environment` with every library limited to `threads` threads and no BLAS tuning.

    >>> pinned_environment({"OPENBLAS_CORETYPE": "Prescott"}, 2)["OMP_NUM_THREADS"]
    '2'
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    kept = {name: value for name, value in environment.items() if name not in TUNING_VARIABLES}
    return kept | dict.fromkeys(COUNT_VARIABLES, str(threads))


def threads_from_arguments(arguments: Sequence[str]) -> int:
    """Read `--threads N` from a command line, 1 when absent.

    >>> threads_from_arguments(["benchmarks", "--threads", "2"]), threads_from_arguments([])
    (2, 1)
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_known_args(arguments)[0].threads


def pin(threads: int) -> None:
    """Limit this process to `threads` threads on as many cores: a library that ignores its limit gains nothing."""
    environment = pinned_environment(os.environ, threads)
    for name in TUNING_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    if hasattr(os, "sched_setaffinity"):  # Linux only
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def blas_threads() -> int | None:
    """Return how many threads NumPy's BLAS really uses, None when it does not say."""
    import numpy  # noqa: F401  (loads the BLAS that is asked below)
    import threadpoolctl

    counts = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    return max(counts, default=None)
