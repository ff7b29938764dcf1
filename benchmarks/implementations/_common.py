"""What every implementation shares."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import Case, Inputs, visible

MASK_LIMIT = 2**26  # entries of a dense mask: 8192 x 8192
SCORES_LIMIT = 2**30  # bytes of a score matrix


class Unsupported(Exception):
    """This implementation cannot do this case; the message says why and becomes the reason of the skip."""


@dataclass(frozen=True)
class Call:
    """`run` does one call, `result` makes (B, H, N, E) of what it returned, `close` frees what Python cannot."""

    run: Callable[[], Any]
    result: Callable[[Any], NDArray]
    close: Callable[[], None] = lambda: None


def require(name: str) -> ModuleType:
    """Import a library that may be absent. Its own deprecation warnings are not this project's to fix."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Unsupported(f"{error.name} is not installed") from error


def dense_mask(case: Case, inputs: Inputs) -> NDArray[np.bool_]:
    """Write out which keys each query may see, (B or 1, 1, N, S), for libraries without the option itself."""
    entries = case.n_queries * case.n_keys * (case.batch if case.padding else 1)
    if entries > MASK_LIMIT:
        raise Unsupported(f"needs a written-out mask of {entries} entries")
    return np.ascontiguousarray(visible(case, inputs, np.arange(case.n_queries)))


def refuse(case: Case, *, linear: bool = True, grouped: bool = False, dtypes: tuple[str, ...] = ("float32",)) -> None:
    """Raise `Unsupported` for what a peer does not offer: linear attention, grouped heads, pages, dtypes."""
    if linear and case.linear:
        raise Unsupported("has no linear attention")
    if grouped and case.n_heads != case.n_kv_heads:
        raise Unsupported("has no grouped key/value heads")
    if case.page_size:
        raise Unsupported("has no paged cache")
    if case.dtype not in dtypes:
        raise Unsupported(f"is not called in {case.dtype} here")
