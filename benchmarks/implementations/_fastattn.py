"""fastattn, called as a user calls it: NumPy arrays in, a NumPy array out, nothing prepared."""

import inspect
from typing import Any

import numpy as np

from benchmarks.cases import Case, Inputs
from benchmarks.implementations._common import Call, Unsupported

NAME = "fastattn"
PACKAGE = "fastattn"


def prepare(case: Case, inputs: Inputs, threads: int) -> Call:
    """Bind the options of the case; those an older fastattn lacks are named in the skip."""
    import fastattn

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
