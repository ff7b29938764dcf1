"""Types of the public functions' arguments.

A function with options has one overload per kind of q and of ``return_lse``. The options themselves stand in a
`TypedDict`, so that each is written once; mypy and pyright check it against the function's own arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastattn._arrays import Array

# Computed in float32, hence with a float32 log-sum-exp. bfloat16 has no static type: its arrays are NDArray[Any].
SmallFloat = TypeVar("SmallFloat", bound=np.float16 | np.float32)

Numbers: TypeAlias = "Sequence[float | Numbers]"
"""Lists in lists of Python's numbers."""

DoubleArray: TypeAlias = NDArray[np.float64 | np.integer[Any] | np.bool_]
"""What is float64 or becomes it; so do Numbers."""

Real: TypeAlias = float | np.floating[Any] | np.integer[Any] | NDArray[np.floating[Any] | np.integer[Any]]
"""One real number, also as a NumPy scalar or an array without axes."""

Report: TypeAlias = Callable[[float], object]
"""What is told the fraction done."""

Window: TypeAlias = tuple[SupportsIndex | None, SupportsIndex | None]


class PackedRules(TypedDict, total=False):
    """What decides the result of `attention_varlen`."""

    causal: bool
    window: Window | None
    scale: Real | None
    softcap: Real | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None


class CacheRules(PackedRules, total=False):
    """What decides the result of a cache's `attend`."""

    mask: ArrayLike | None
    bias: ArrayLike | None
    q_offset: ArrayLike | None


class AttentionRules(CacheRules, total=False):
    """What decides the result of `attention`."""

    kv_lens: ArrayLike | None
    block_table: ArrayLike | None


class Resources(TypedDict, total=False):
    """What only the fast functions have."""

    out: Array | None
    num_threads: SupportsIndex | None
    progress: Report | None


class PackedOptions(PackedRules, Resources, total=False):
    """The options of `attention_varlen`, except return_lse."""


class AttentionOptions(AttentionRules, Resources, total=False):
    """The options of `attention`, except return_lse."""


class CacheOptions(CacheRules, Resources, total=False):
    """The options of a cache's `attend`, except return_lse."""
