"""fastattn, called as a user calls it: NumPy arrays in, a NumPy array out, nothing prepared."""

import inspect
from typing import Any

import numpy as np

from benchmarks.cases import Case, Inputs, numpy_dtype
from benchmarks.implementations._common import Call, Unsupported

NAME = "fastattn"
PACKAGE = "fastattn"


def prepare(case: Case, inputs: Inputs, threads: int) -> Call:
    """Bind the options of the case; those an older fastattn lacks are named in the skip."""
    import fastattn

    if case.group == "cache":
        return _prepare_cache(case, inputs)
    if case.linear and not hasattr(fastattn, "linear_attention"):
        raise Unsupported("the installed fastattn lacks linear_attention")
    function = fastattn.linear_attention if case.linear else fastattn.attention
    options = _options(case, inputs)
    missing = sorted(set(options) - set(inspect.signature(function).parameters))
    if missing:
        raise Unsupported(f"the installed fastattn lacks {', '.join(missing)}")
    q, k, v = inputs.q, inputs.k, inputs.v
    if case.dtype in ("float16", "bfloat16"):
        try:
            function(q, k, v, **options)
        except TypeError as error:
            raise Unsupported(f"the installed fastattn lacks {case.dtype}") from error
    return Call(lambda: function(q, k, v, **options), np.asarray)


def _prepare_cache(case: Case, inputs: Inputs) -> Call:
    """Fill a cache. Sequences grow by turns, page by page, so that the pages of one do not lie side by side."""
    import fastattn

    if not hasattr(fastattn, "PagedKVCache"):
        raise Unsupported("the installed fastattn lacks caches")
    sizes = (case.n_kv_heads, case.head_dim)
    options: dict[str, Any] = {"value_dim": case.value_dim, "dtype": numpy_dtype(case.dtype)}
    if not case.page_size:
        contiguous = fastattn.KVCache(case.batch, sizes[0], case.n_keys, sizes[1], **options)
        contiguous.append(inputs.k, inputs.v)
        return Call(lambda: contiguous.attend(inputs.q), np.asarray)
    pages = case.batch * -(-case.n_keys // case.page_size)
    paged = fastattn.PagedKVCache(pages, case.page_size, *sizes, **options)
    sequences = [paged.allocate() for _ in range(case.batch)]
    for start in range(0, case.n_keys, case.page_size):
        rows = slice(start, start + case.page_size)
        paged.append(inputs.k[:, :, rows], inputs.v[:, :, rows], sequences)
    return Call(lambda: paged.attend(inputs.q, sequences), np.asarray)


def _options(case: Case, inputs: Inputs) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if case.causal:
        options["causal"] = True
    if case.window is not None:
        options["window"] = (case.window, 0)
    if inputs.kv_lens is not None:
        options["kv_lens"] = inputs.kv_lens
    if inputs.mask is not None:
        options["mask"] = inputs.mask
    return options
