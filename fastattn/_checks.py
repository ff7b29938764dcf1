"""The checks of `attention`'s arrays against each other, and of its options against the arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._arrays import FLOAT32, FLOAT64, KINDS, Array, as_array, as_floats, is_half
from fastattn._options import (
    Options,
    Sizes,
    check_bias,
    check_lengths,
    check_offsets,
    check_pages,
    check_pages_used,
    check_per_head,
    check_slopes,
    check_softcap,
    check_window,
)
from fastattn._typing import Real, Window


@dataclass(slots=True)
class Checked:
    """q, k and v with their heads axis and, unless paged, one leading shape; and the shape of the result."""

    q: Array
    k: Array
    v: Array
    out_shape: tuple[int, ...]
    paged: bool

    @property
    def lead(self) -> tuple[int, ...]:
        return tuple(self.q.shape[:-3])


def check_dtypes(q: Array, k: Array, v: Array, given: list[Array]) -> None:
    """Of q, k and v as they count; `given` are the same as they came."""
    came = [f"{x.dtype} (taken as float64)" if x.dtype.kind in "biu" else str(x.dtype) for x in given]
    if k.dtype != v.dtype:
        raise TypeError(f"k and v must have the same dtype, got {came[1]} and {came[2]}")
    if q.dtype != k.dtype and not (q.dtype == FLOAT32 and is_half(k.dtype)):
        raise TypeError(
            f"q, k and v must have the same dtype (or q float32 with float16 or bfloat16 k and v), "
            f"got {came[0]}, {came[1]} and {came[2]}"
        )


def check_heads(n_heads: int, n_kv_heads: int, v_heads: int) -> None:
    if n_kv_heads != v_heads:
        raise ValueError(f"k and v must have the same number of heads, got {n_kv_heads} and {v_heads}")
    if n_kv_heads == 0 and n_heads > 0:
        raise ValueError(f"k and v must have at least one head for q's {n_heads} heads, got 0")
    if n_kv_heads and n_heads % n_kv_heads:
        raise ValueError(f"q's number of heads must be a multiple of k's, got {n_heads} and {n_kv_heads}")


def check_arrays(q: Any, k: Any, v: Any, *, paged: bool) -> Checked:
    """Kinds, dtypes and shapes of q, k, v; leading axes broadcast, as views."""
    given = [as_array("q", q), as_array("k", k), as_array("v", v)]
    q, k, v = as_floats("q", given[0]), as_floats("k", given[1]), as_floats("v", given[2])
    if q.dtype is not k.dtype or k.dtype is not v.dtype:
        check_dtypes(q, k, v, given)
    return check_shapes(q, k, v, paged=paged)


def check_shapes(q: Array, k: Array, v: Array, *, paged: bool) -> Checked:
    """The shapes of q, k, v, whatever their dtypes; leading axes broadcast, as views."""
    arrays = {"q": q, "k": k, "v": v}
    for name, array in arrays.items():
        least = 4 if paged and name != "q" else 2
        if array.ndim < least or (paged and name != "q" and array.ndim != 4):
            axes = "(pages, K, page, features)" if least == 4 else "(..., heads, rows, features) or (rows, features)"
            raise ValueError(f"{name} must have shape {axes}, got {array.shape}")
    flat = all(array.ndim == 2 for array in arrays.values())
    q, k, v = (array[None] if array.ndim == 2 else array for array in arrays.values())
    check_heads(q.shape[-3], k.shape[-3], v.shape[-3])
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k must have shape (..., {k.shape[-3]}, {k.shape[-2]}, {q.shape[-1]}) to match q {q.shape}, got {k.shape}"
        )
    if v.shape[-2] != k.shape[-2] or (paged and v.shape[0] != k.shape[0]):
        raise ValueError(
            f"v must have shape (..., {k.shape[-3]}, {k.shape[-2]}, E) to match k {k.shape}, got {v.shape}"
        )
    if not paged and not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        try:
            lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        except ValueError:
            raise ValueError(
                f"leading axes of q, k and v must broadcast, got {q.shape[:-3]}, {k.shape[:-3]} and {v.shape[:-3]}"
            ) from None
        q, k, v = (x if x.shape[:-3] == lead else np.broadcast_to(x, lead + x.shape[-3:]) for x in (q, k, v))
    out_shape = (*q.shape[:-1], v.shape[-1])
    return Checked(q, k, v, out_shape[1:] if flat else out_shape, paged)


def check_options(
    checked: Checked,
    *,
    mask: Any,
    bias: Any,
    causal: bool,
    window: Window | None,
    q_offset: Any,
    kv_lens: Any,
    block_table: Any,
    softcap: Real | None,
    alibi_slopes: Any,
    sinks: Any,
) -> Options:
    """Every option against the arrays' sizes."""
    page_size = checked.k.shape[-2]
    sizes = Sizes(checked.lead, checked.q.shape[-3], checked.q.shape[-2], page_size)
    options = Options(computing_kind=KINDS["float64" if checked.q.dtype == FLOAT64 else "float32"])
    if block_table is not None:
        if kv_lens is None:
            raise ValueError("block_table needs kv_lens, got none: only the lengths say which keys are valid")
        options.pages = check_pages(block_table, sizes.lead)
        sizes.n_keys = options.pages.shape[1] * page_size
    options.left, options.right = check_window(window, causal)
    options.softcap = check_softcap(softcap)
    if kv_lens is not None:
        options.lengths = check_lengths(kv_lens, sizes)
    if options.pages is not None and options.lengths is not None:
        check_pages_used(options.pages, options.lengths, page_size, checked.k.shape[0])
    if q_offset is not None:
        options.offsets = check_offsets(q_offset, sizes)
    if alibi_slopes is not None:
        options.slopes = check_slopes(alibi_slopes, sizes)
    if sinks is not None:
        options.sinks = check_per_head("sinks", sinks, sizes, per_entry=False)
    if mask is not None:
        options.mask, options.mask_kind = check_bias("mask", mask, sizes)
    if bias is not None:
        options.bias, options.bias_kind = check_bias("bias", bias, sizes)
    return options
