"""Time against one growing dimension: queries and keys, keys, batch, heads."""

from collections.abc import Callable

import pytest

from benchmarks.cases import SCALING_CASES as CASES
from benchmarks.cases import Case

__all__ = ["CASES"]


# A curve needs less precision at each point than a table, and has many points.
@pytest.mark.benchmark(min_time=0.002, min_rounds=3, max_time=0.2, disable_gc=True)
def test_scaling(case: Case, implementation: str, measure: Callable[[Case, str], None]) -> None:
    measure(case, implementation)
