"""Decoding from a cache of each dtype, contiguous and in pages."""

from collections.abc import Callable

import pytest

from benchmarks.cases import CACHE_CASES as CASES
from benchmarks.cases import Case

__all__ = ["CASES"]


# What is compared is one case with another, so each is timed long enough to outlast the machine's moods.
@pytest.mark.benchmark(min_time=0.002, min_rounds=15, max_time=1.5, disable_gc=True)
def test_cache(case: Case, implementation: str, measure: Callable[[Case, str], None]) -> None:
    measure(case, implementation)
