"""Calls that type checkers must refuse: mypy fails on an ignored error that is none. Nothing here is run."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import fastattn

if TYPE_CHECKING:
    from fastattn._kernels import avx2


def refused(single: NDArray[np.float32]) -> None:
    fastattn.attention(single, single)  # type: ignore[call-overload]
    fastattn.attention(single, single, single, single)  # type: ignore[call-overload]
    fastattn.attention(single, single, single, casual=True)  # type: ignore[call-overload]
    fastattn.attention(single, single, single, window=4)  # type: ignore[call-overload]
    fastattn.attention(single, single, single, causal="yes")  # type: ignore[call-overload]
    fastattn.attention(single, single, single, out=[[0.0]])  # type: ignore[call-overload]
    fastattn.attention(single, single, single, progress=3)  # type: ignore[call-overload]
    fastattn.attention_varlen(single, single, single, [0, 5], mask=single)  # type: ignore[call-overload]
    fastattn.multi_head_attention(single, single, single)  # type: ignore[call-overload]
    fastattn.multi_head_attention(single, single, single, 2.0)  # type: ignore[call-overload]
    fastattn.scaled_dot_product_attention(single, single, single, is_causal=1)  # type: ignore[call-overload]
    fastattn.linear_attention(single, single, single, scale="1")  # type: ignore[call-overload]
    fastattn.KVCache(2, 4, 100, 64.0)  # type: ignore[arg-type]
    fastattn.KVCache(2, 4, 100, 64).attend(single, kv_lens=3)  # type: ignore[call-overload]
    fastattn.PagedKVCache(2, 16, 4, 64).attend(single)  # type: ignore[call-overload]
    fastattn.show_config("json")  # type: ignore[call-overload]
    fastattn.set_num_threads(1.5)  # type: ignore[arg-type]
    avx2.attention_float64(single, single, single, single, None, 1.0, 1, None)  # type: ignore[arg-type]
