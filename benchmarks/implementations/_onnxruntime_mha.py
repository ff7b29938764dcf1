"""ONNX Runtime's own operator `com.microsoft.MultiHeadAttention`."""

from benchmarks.cases import Case, Inputs
from benchmarks.implementations._common import Call, Unsupported, refuse, require
from benchmarks.implementations._onnxruntime_common import PACKAGE, merge_heads, session, split_heads

NAME = "ort_mha"

__all__ = ["NAME", "PACKAGE", "prepare"]


def prepare(case: Case, inputs: Inputs, threads: int) -> Call:
    """Bring the arrays into the operator's layout (B, N, H * D) once, outside the timing."""
    require("onnxruntime")
    onnx = require("onnx")
    refuse(case, grouped=True)
    if case.masked and not case.square:
        raise Unsupported("MultiHeadAttention has only plain causal self-attention")
    feed = {"q": merge_heads(inputs.q), "k": merge_heads(inputs.k), "v": merge_heads(inputs.v)}
    node = onnx.helper.make_node(
        "MultiHeadAttention",
        list(feed),
        ["out"],
        domain="com.microsoft",
        num_heads=case.n_heads,
        unidirectional=int(case.square),
    )
    compiled = session(node, {"": 17, "com.microsoft": 1}, feed, threads)
    return Call(lambda: compiled.run(None, feed)[0], lambda out: split_heads(out, case.n_heads))
