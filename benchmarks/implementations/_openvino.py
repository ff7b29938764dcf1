"""OpenVINO: a model of the single operation `ScaledDotProductAttention`, its tensors sharing the arrays' memory."""

from typing import Any

import numpy as np

from benchmarks.cases import Case, Inputs
from benchmarks.implementations._common import Call, dense_mask, refuse, require

NAME = "openvino"
PACKAGE = "openvino"


def prepare(case: Case, inputs: Inputs, threads: int) -> Call:
    """Compile once for exactly these shapes; float32 is asked for, so that the arithmetic is the same everywhere."""
    openvino = require("openvino")
    operations = require("openvino.opset13")
    refuse(case, grouped=True)
    arrays = [inputs.q, inputs.k, inputs.v]
    if case.masked and not case.square:
        arrays.append(dense_mask(case, inputs))
    parameters = [operations.parameter(x.shape, x.dtype.type) for x in arrays]
    node = operations.scaled_dot_product_attention(*parameters, causal=case.square)
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
    }
    compiled = openvino.Core().compile_model(openvino.Model([node], parameters), "CPU", settings)
    request = compiled.create_infer_request()
    tensors = [openvino.Tensor(x) for x in arrays]

    def run() -> Any:
        request.infer(tensors)
        return request.get_output_tensor(0).data

    return Call(run, np.array)
