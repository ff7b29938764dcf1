"""ggml, the library under llama.cpp: its flash attention for the CPU, `ggml_flash_attn_ext`."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import Case, Inputs
from benchmarks.implementations._common import Call, Unsupported, dense_mask, refuse, require

NAME = "ggml"
PACKAGE = "ggml-python"

POOL_MARGIN = 1 << 20  # ggml's own headers of tensors and graph


def prepare(case: Case, inputs: Inputs, threads: int) -> Call:
    """Copy the arrays into a ggml pool and plan the graph once; a call runs the plan.

    Queries are float32, keys and values keep their own type, as in llama.cpp.
    """
    ggml = require("ggml")
    refuse(case, dtypes=("float32", "float16", "bfloat16"))
    if case.group == "tiny":
        raise Unsupported("replays a planned graph, which says nothing about the cost of a call")
    kinds = {"float32": ggml.GGML_TYPE_F32, "float16": ggml.GGML_TYPE_F16, "bfloat16": ggml.GGML_TYPE_BF16}
    q = inputs.q.astype(np.float32)
    arrays = [(q, ggml.GGML_TYPE_F32), (inputs.k, kinds[case.dtype]), (inputs.v, kinds[case.dtype])]
    if case.masked:
        arrays.append((_padded_mask(dense_mask(case, inputs), ggml.GGML_KQ_MASK_PAD), ggml.GGML_TYPE_F16))
    out_bytes = 4 * case.batch * case.n_heads * case.n_queries * case.value_dim
    pool_bytes = sum(x.nbytes for x, _ in arrays) + out_bytes + POOL_MARGIN
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=pool_bytes, mem_buffer=None, no_alloc=False))
    tensors = [_tensor(ggml, context, x, kind) for x, kind in arrays]
    mask = tensors[3] if case.masked else None
    out = ggml.ggml_flash_attn_ext(context, *tensors[:3], mask, case.head_dim**-0.5, 0.0, 0.0)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, out)
    plan = ggml.ggml_graph_plan(graph, threads, None)
    scratch = (ctypes.c_uint8 * max(plan.work_size, 1))()
    plan.work_data = ctypes.cast(scratch, ctypes.POINTER(ctypes.c_uint8))
    plan_pointer = ctypes.byref(plan)

    def run() -> Any:
        status = ggml.ggml_graph_compute(graph, plan_pointer)
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute returned {status}")
        return scratch  # the plan points into it

    def result(_: Any) -> NDArray:
        data = ctypes.cast(ggml.ggml_get_data(out), ctypes.POINTER(ctypes.c_float))
        shape = (case.batch, case.n_queries, case.n_heads, case.value_dim)
        return np.ctypeslib.as_array(data, shape).swapaxes(1, 2).copy()

    return Call(run, result, lambda: ggml.ggml_free(context))


def _tensor(ggml: Any, context: Any, x: NDArray, kind: int) -> Any:
    """Copy a contiguous 4-D array into the pool; ggml lists dimensions from the fastest."""
    tensor = ggml.ggml_new_tensor_4d(context, kind, *reversed(x.shape))
    ctypes.memmove(ggml.ggml_get_data(tensor), x.ctypes.data, x.nbytes)
    return tensor


def _padded_mask(mask: NDArray[np.bool_], multiple: int) -> NDArray[np.float16]:
    """Turn a boolean mask into the float16 one of ggml, 0 or -inf, its queries padded to a multiple."""
    batch, heads, queries, keys = mask.shape
    rows = -(-queries // multiple) * multiple
    padded = np.full((batch, heads, rows, keys), -np.inf, dtype=np.float16)
    padded[:, :, :queries][mask] = 0
    return padded
