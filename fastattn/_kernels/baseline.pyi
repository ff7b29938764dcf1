# What every kernel module offers: the shape that all levels share. The functions check nothing; arrays have the
# layout that `fastattn._call` gives them: q and out (B, H, N, D or E), k and v (B, K, S, D or E), lse (B, H, N).
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

from fastattn._options import Options as CallOptions

isa: str
openmp: bool
vector_bits: int
vector_extension: bool

@disjoint_base
class Options: ...  # the arrays of the checked options, borrowed for one call

def max_threads() -> int: ...
def decodes_into_first_level(wanted: bool | None = None) -> bool: ...
def attention_common(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    empty: Callable[[tuple[int, ...], np.dtype[np.float32]], NDArray[np.float32]],
    dtype: np.dtype[np.float32],
    ask_threads: Callable[[], int],
) -> NDArray[np.float32] | None: ...
def attention_float32(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    out: NDArray[np.float32],
    lse: NDArray[np.float32] | None,
    scale: float,
    num_threads: int,
    options: CallOptions | None = None,
) -> None: ...
def attention_float64(
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    out: NDArray[np.float64],
    lse: NDArray[np.float64] | None,
    scale: float,
    num_threads: int,
    options: CallOptions | None = None,
) -> None: ...
def attention_half(
    q: NDArray[np.uint16],
    k: NDArray[np.uint16],
    v: NDArray[np.uint16],
    out: NDArray[np.uint16],
    lse: NDArray[np.float32] | None,
    scale: float,
    num_threads: int,
    bfloat16: bool,
    options: CallOptions | None = None,
) -> None: ...
def attention_float32_half(
    q: NDArray[np.float32],
    k: NDArray[np.uint16],
    v: NDArray[np.uint16],
    out: NDArray[np.float32],
    lse: NDArray[np.float32] | None,
    scale: float,
    num_threads: int,
    bfloat16: bool,
    options: CallOptions | None = None,
) -> None: ...
def attention_int8(
    q: NDArray[np.float32],
    k: NDArray[np.int8],
    v: NDArray[np.int8],
    k_scales: NDArray[np.float32],
    v_scales: NDArray[np.float32],
    out: NDArray[np.float32],
    lse: NDArray[np.float32] | None,
    scale: float,
    num_threads: int,
    options: CallOptions | None = None,
) -> None: ...
