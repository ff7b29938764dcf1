"""The named cases, each with every implementation."""

from collections.abc import Callable

import pytest

from benchmarks.cases import CASES, Case

__all__ = ["CASES"]


# A round lasts at least 2 ms, so that the clock costs nothing; 5 rounds at least, more while half a second lasts.
@pytest.mark.benchmark(min_time=0.002, min_rounds=5, max_time=0.5, disable_gc=True)
def test_attention(case: Case, implementation: str, measure: Callable[[Case, str], None]) -> None:
    measure(case, implementation)
