"""Combining attention over disjoint key sets by the logarithms of their softmax denominators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastattn._arrays import Array, accumulation_dtype, as_floats
from fastattn._typing import DoubleArray, Numbers, SmallFloat

__all__ = ["merge_states"]


@overload
def merge_states(  # type: ignore[overload-overlap]
    outs: Sequence[NDArray[SmallFloat]] | NDArray[SmallFloat], lses: Sequence[ArrayLike] | Array
) -> tuple[NDArray[SmallFloat], NDArray[np.float32]]: ...
@overload
def merge_states(
    outs: Sequence[DoubleArray] | DoubleArray | Numbers, lses: Sequence[ArrayLike] | Array
) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...
@overload
def merge_states(outs: Sequence[ArrayLike] | Array, lses: Sequence[ArrayLike] | Array) -> tuple[Array, Array]: ...


def merge_states(outs: Sequence[ArrayLike] | Array, lses: Sequence[ArrayLike] | Array) -> tuple[Array, Array]:
    """Combine the results of attention over disjoint key sets into that over all the keys.

    With the states' results ``o_i`` and ``l_i``, as returned by ``attention(..., return_lse=True)``, computes
    ``lse = log(sum(exp(l_i)))`` and ``out = sum(exp(l_i - lse) * o_i)``.

    Parameters
    ----------
    outs : sequence of array_like, shape (..., N, E)
        One array per state, or one array whose first axis runs over the states. All of one shape and dtype:
        float32, float64, float16 or bfloat16; lists and integers become float64.
    lses : sequence of array_like, shape (..., N)
        Natural logarithms of the softmax denominators, float64 for float64 `outs` and float32 for all others.

    Returns
    -------
    out : ndarray, shape (..., N, E)
        Of the dtype of `outs`; half types are computed in float32.
    lse : ndarray, shape (..., N)
        Of the dtype of `lses`.

    Raises
    ------
    TypeError
        If an argument is not a sequence, or the dtypes are not supported or do not fit.
    ValueError
        If there is no state, or the numbers of states or the shapes do not fit.

    Notes
    -----
    A state whose lse is -inf has seen no key: it has weight 0 whatever its `outs` entry holds, NaN included. A row
    in which every state is empty gives 0 and -inf. An lse of +inf or NaN makes its row NaN. The shift by the largest
    lse, which keeps the exponentials from overflowing, is that of Milakov and Gimelshein, *Online normalizer
    calculation for softmax*, 2018.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn import merge_states
    >>> out, lse = merge_states([[[4.0]], [[8.0]]], [[0.0], [np.log(3.0)]])
    >>> print(out.round(6), np.exp(lse).round(6))
    [[7.]] [4.]
    """
    states, logs = _check_states(outs, lses)
    dtype = states[0].dtype
    accumulation = accumulation_dtype(dtype)
    with np.errstate(all="ignore"):
        weights = np.stack(logs).astype(accumulation, copy=False)
        empty = np.isneginf(weights)
        shift = weights.max(axis=0)
        shift[np.isneginf(shift)] = 0  # -inf - -inf would be NaN
        np.exp(np.subtract(weights, shift, out=weights), out=weights)
        total = weights.sum(axis=0)
        lse = np.log(total) + shift
        weights /= total  # before the products, because a sum of unnormalised ones could overflow
        result = np.zeros(states[0].shape, accumulation)
        for state, weight, skip in zip(states, weights[..., np.newaxis], empty[..., np.newaxis], strict=True):
            np.add(result, weight * state.astype(accumulation, copy=False), out=result, where=~skip)
        return result.astype(dtype, copy=False), lse


def _check_states(
    outs: Sequence[ArrayLike] | Array, lses: Sequence[ArrayLike] | Array
) -> tuple[list[Array], list[Array]]:
    """Return the states as lists of arrays of one length, shape and dtype."""
    n_states, n_logs = _count_states("outs", outs), _count_states("lses", lses)
    if n_states == 0:
        raise ValueError("outs must hold at least one state, got none")
    if n_logs != n_states:
        raise ValueError(f"lses must hold one array for each of the {n_states} states, got {n_logs}")
    states: list[Array] = []
    logs: list[Array] = []
    # One by one, so that what is no state is refused before the rest is touched, however much that is.
    for index, pair in enumerate(zip(outs, lses, strict=True)):
        state, log = as_floats(f"outs[{index}]", pair[0]), as_floats(f"lses[{index}]", pair[1])
        first = states[0] if states else state
        shape, dtype = first.shape, first.dtype
        if len(shape) < 2:
            raise ValueError(f"outs[0] must have shape (..., N, E), got {shape}")
        if state.shape != shape:
            raise ValueError(f"outs[{index}] must have shape {shape} to match outs[0], got {state.shape}")
        if log.shape != shape[:-1]:
            raise ValueError(f"lses[{index}] must have shape {shape[:-1]} to match outs, got {log.shape}")
        if state.dtype != dtype:
            raise TypeError(f"outs[{index}] must be {dtype} to match outs[0], got {state.dtype}")
        if log.dtype != accumulation_dtype(dtype):
            raise TypeError(f"lses[{index}] must be {accumulation_dtype(dtype)} to match {dtype} outs, got {log.dtype}")
        states.append(state)
        logs.append(log)
    return states, logs


def _count_states(name: str, value: Sequence[ArrayLike] | Array) -> int:
    if not isinstance(value, np.ndarray | Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{name} must be a sequence of arrays or one stacked array, got {type(value).__name__}")
    if isinstance(value, np.ndarray) and value.ndim == 0:
        raise ValueError(f"{name} must have a first axis that runs over the states, got shape ()")
    return len(value)
