"""ONNX Runtime on the standard operator `Attention` of opset 23."""

import numpy as np

from benchmarks.cases import Case, Inputs
from benchmarks.implementations._common import Call, dense_mask, refuse, require
from benchmarks.implementations._onnxruntime_common import PACKAGE, session

NAME = "ort_attention"

__all__ = ["NAME", "PACKAGE", "prepare"]


def prepare(case: Case, inputs: Inputs, threads: int) -> Call:
    """Plain causal self-attention uses the operator's flag, every other restriction a written-out mask."""
    require("onnxruntime")
    onnx = require("onnx")
    refuse(case, dtypes=("float32", "float16"))
    feed = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if case.masked and not case.square:
        feed["mask"] = dense_mask(case, inputs)
    node = onnx.helper.make_node("Attention", list(feed), ["out"], is_causal=int(case.square))
    compiled = session(node, {"": 23}, feed, threads)
    return Call(lambda: compiled.run(None, feed)[0], np.asarray)
