"""From checked arrays to one kernel call: axes, dtypes, threads."""

from __future__ import annotations

import math
from dataclasses import replace

from fastattn._arrays import FLOAT32, FLOAT64, Array, bits_view, float_kind, is_half, leading_collapses
from fastattn._dispatch import kernel
from fastattn._options import Options
from fastattn._progress import part_of, reported


def call_kernel(
    q: Array, k: Array, v: Array, out: Array, lse: Array | None, scale: float, num_threads: int, options: Options | None
) -> None:
    """One call on 4-D arrays (entries, heads, rows, features), whatever their dtypes."""
    if q.dtype == FLOAT32 and k.dtype == FLOAT32:
        kernel.attention_float32(q, k, v, out, lse, scale, num_threads, options)
    elif q.dtype == FLOAT64:
        kernel.attention_float64(q, k, v, out, lse, scale, num_threads, options)
    elif options is not None and options.scales is not None:
        kernel.attention_int8(q, k, v, *options.scales, out, lse, scale, num_threads, options)
    else:
        function = kernel.attention_half if is_half(q.dtype) else kernel.attention_float32_half
        bfloat16 = float_kind(k.dtype) == "bfloat16"
        q, k, v, out = (bits_view(x) for x in (q, k, v, out))
        function(q, k, v, out, lse, scale, num_threads, bfloat16, options)


def _one_entry_axis(array: Array, n_core: int) -> Array:
    """The leading axes as one; their number is worked out, because -1 cannot be among axes of size 0."""
    if array.ndim == n_core + 1:
        return array
    return array.reshape(math.prod(array.shape[:-n_core]), *array.shape[-n_core:])


def call_over_leading(
    q: Array, k: Array, v: Array, out: Array, lse: Array | None, scale: float, num_threads: int, options: Options | None
) -> None:
    """A call on arrays with any leading axes, all of the same leading shape (k and v of a paged call excepted).

    Leading axes that are one axis in memory become one; others are looped over, so that nothing is copied.
    """
    lead = q.shape[:-3]
    if len(lead) == 1:
        call_kernel(q, k, v, out, lse, scale, num_threads, options)
        return
    paged = options is not None and options.pages is not None
    extra = [] if options is None else [x for x in (options.mask, options.bias) if x is not None]
    scales = None if options is None or paged else options.scales
    arrays = [q, out, *extra] if paged else [q, k, v, out, *extra]
    if not lead or (
        all(leading_collapses(x, 3) for x in arrays) and all(leading_collapses(x, 2) for x in scales or ())
    ):
        if options is not None:
            mask, bias = (None if x is None else _one_entry_axis(x, 3) for x in (options.mask, options.bias))
            options = replace(options, mask=mask, bias=bias)
        if options is not None and scales is not None:
            options = replace(options, scales=(_one_entry_axis(scales[0], 2), _one_entry_axis(scales[1], 2)))
        q, k, v, out = (_one_entry_axis(x, 3) for x in (q, k, v, out))
        lse = None if lse is None else _one_entry_axis(lse, 2)
        call_kernel(q, k, v, out, lse, scale, num_threads, options)
        return
    for outer in reported(range(lead[0]), None if options is None else options.progress):
        call_over_leading(
            q[outer],
            k if paged else k[outer],
            v if paged else v[outer],
            out[outer],
            None if lse is None else lse[outer],
            scale,
            num_threads,
            None if options is None else _entries_of(options, outer, lead[0]),
        )


def _entries_of(options: Options, outer: int, n_outer: int) -> Options:
    """The options of one index of the outermost leading axis."""

    scales = options.scales
    if scales is not None and options.pages is None:
        scales = scales[0][outer], scales[1][outer]

    def part(array: Array | None) -> Array | None:
        return None if array is None else array.reshape(n_outer, len(array) // n_outer, *array.shape[1:])[outer]

    return replace(
        options,
        lengths=part(options.lengths),
        offsets=part(options.offsets),
        pages=part(options.pages),
        slopes=part(options.slopes),
        progress=part_of(options.progress, outer, n_outer),
        mask=None if options.mask is None else options.mask[outer],
        bias=None if options.bias is None else options.bias[outer],
        scales=scales,
    )
