"""The check before a timing: sampled rows of a result against float64."""

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import Case, Inputs, visible

SAMPLED_HEADS = 6
SAMPLED_ROWS = 8


def largest_error(case: Case, inputs: Inputs, result: NDArray) -> float:
    """Return the largest error of `result` (B, H, N, E) on sampled rows, always with the first and the last query.

    Attention is a mean of values that are about 1, so its error is taken as it is. Linear attention is a sum that grows
    with the keys, so its error is divided by the largest value expected. A result that is not finite has an infinite
    error.
    """
    expected_shape = (case.batch, case.n_heads, case.n_queries, case.value_dim)
    if result.shape != expected_shape:
        raise ValueError(f"result must have shape {expected_shape}, got {result.shape}")
    random = np.random.default_rng(2)
    worst = 0.0
    for _ in range(SAMPLED_HEADS):
        batch, head = int(random.integers(case.batch)), int(random.integers(case.n_heads))
        rows = np.unique([0, case.n_queries - 1, *random.integers(0, case.n_queries, SAMPLED_ROWS)])
        want = expected_rows(case, inputs, batch, head, rows)
        got = result[batch, head, rows].astype(np.float64)
        if not np.isfinite(got).all():
            return float("inf")
        error = float(np.abs(got - want).max(initial=0.0))
        worst = max(worst, error / float(np.abs(want).max()) if case.linear else error)
    return worst


def expected_rows(case: Case, inputs: Inputs, batch: int, head: int, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Compute the outputs (len(rows), E) of one head in float64, by the definition."""
    kv_head = head // (case.n_heads // case.n_kv_heads)
    k = inputs.k[batch, kv_head].astype(np.float64)
    v = inputs.v[batch, kv_head].astype(np.float64)
    scores = inputs.q[batch, head, rows].astype(np.float64) @ k.T
    if case.linear:
        return scores @ v
    seen = visible(case, inputs, rows)
    scores = np.where(seen[min(batch, len(seen) - 1), 0], scores / np.sqrt(case.head_dim), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ v
