"""What a cache's dtype and pages cost, as Markdown: python -m benchmarks.cache_costs [--seconds S] [--smoke].

The cases of the cache group, two at a time and by turns, so that the machine's moods meet both: half types and int8
against float32, pages against contiguous rows of the same dtype.
"""

import argparse
from collections.abc import Iterator

import numpy as np

import fastattn
from benchmarks.cases import CACHE_CASES, TOLERANCE, Case, make_inputs
from benchmarks.costs import ratio_by_turns
from benchmarks.implementations import IMPLEMENTATIONS, Call
from benchmarks.reference import largest_error

INTRODUCTION = """\
# What a cache's dtype and pages cost

<!-- Printed by `python -m benchmarks.cache_costs`; changes by hand are lost. -->

Time of a decoding step divided by that of the contiguous cache of float32, or for pages of the same dtype: 4 sequences
of 8192 keys that grew by turns, 8 heads of 128 features, more than last-level caches hold; median of alternating calls;
below 1 it saves time.
"""
THREADS = (1, 2)


def pairs() -> Iterator[tuple[Case, Case]]:
    """Yield each case with the one that it is divided by."""
    contiguous = {case.dtype: case for case in CACHE_CASES if not case.page_size}
    for case in CACHE_CASES:
        base = contiguous[case.dtype if case.page_size else "float32"]
        if case is not base:
            yield case, base


def prepare(case: Case) -> Call:
    """Fill the case's cache; a step that is wrong raises ValueError and is not timed."""
    inputs = make_inputs(case)
    call = IMPLEMENTATIONS["fastattn"].prepare(case, inputs, 1)
    error = largest_error(case, inputs, np.asarray(call.run()))
    if not error <= TOLERANCE[case.dtype]:
        raise ValueError(f"{case.name} is off by {error}")
    return call


def row(case: Case, base: Case, seconds: float) -> str:
    """Render one case: its ratio at each number of threads."""
    timed, against = prepare(case), prepare(base)
    cells = []
    try:
        for n_threads in THREADS:
            fastattn.set_num_threads(n_threads)
            cells.append(f"{ratio_by_turns(against.run, timed.run, seconds):.2f}")
    finally:
        fastattn.set_num_threads(None)
    what = f"pages of {case.page_size}, over contiguous" if case.page_size else "contiguous, over float32"
    return f"| {case.dtype}, {what} | {' | '.join(cells)} |"


def table(seconds: float, *, smoke: bool = False) -> str:
    """Render one row per pair, one column per number of threads."""
    lines = ["| | " + " | ".join(f"threads: {n}" for n in THREADS) + " |", "|:--|" + "--:|" * len(THREADS)]
    lines += [row(*(case.smoke() if smoke else case for case in pair), seconds) for pair in pairs()]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="per pair and number of threads")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one turn")
    arguments = parser.parse_args()
    print(INTRODUCTION)
    print(table(0.0 if arguments.smoke else arguments.seconds, smoke=arguments.smoke))
