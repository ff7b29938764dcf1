"""One-node ONNX models run by ONNX Runtime."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.implementations._common import require

PACKAGE = "onnxruntime"
IR_VERSION = 10


def session(node: Any, opsets: dict[str, int], feed: dict[str, NDArray], threads: int) -> Any:
    """Compile `node`, whose output is called "out", for inputs like `feed`."""
    onnx, runtime = require("onnx"), require("onnxruntime")
    helper = onnx.helper

    def value(name: str, x: NDArray) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)

    dtype = helper.np_dtype_to_tensor_dtype(next(iter(feed.values())).dtype)
    graph = helper.make_graph(
        [node],
        "attention",
        [value(name, x) for name, x in feed.items()],
        [helper.make_tensor_value_info("out", dtype, None)],
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # a refused model is reported as a skip, not in the terminal
    return runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def merge_heads(x: NDArray) -> NDArray:
    """(B, H, N, D) -> (B, N, H * D)."""
    batch, heads, length, dim = x.shape
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(batch, length, heads * dim)


def split_heads(x: NDArray, heads: int) -> NDArray:
    """(B, N, H * D) -> (B, H, N, D)."""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).swapaxes(1, 2)
