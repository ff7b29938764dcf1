"""PyTorch: `torch.nn.functional.scaled_dot_product_attention` on tensors that share the arrays' memory."""

from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import Case, Inputs
from benchmarks.implementations._common import Call, dense_mask, refuse, require

NAME = "torch"
PACKAGE = "torch"


def prepare(case: Case, inputs: Inputs, threads: int) -> Call:
    """Wrap the arrays once, in inference mode; plain causal self-attention uses the flag, the rest a dense mask."""
    torch = require("torch")
    refuse(case, dtypes=("float32", "float64", "float16", "bfloat16"))
    torch.set_num_threads(threads)
    options: dict[str, Any] = {"enable_gqa": case.n_heads != case.n_kv_heads}
    if case.square:
        options["is_causal"] = True
    elif case.masked:
        options["attn_mask"] = torch.from_numpy(dense_mask(case, inputs))

    def tensor(x: NDArray) -> Any:
        if case.dtype == "bfloat16":  # PyTorch does not know the dtype of ml_dtypes
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    mode = ExitStack()
    mode.enter_context(torch.inference_mode())
    q, k, v = tensor(inputs.q), tensor(inputs.k), tensor(inputs.v)
    function = torch.nn.functional.scaled_dot_product_attention

    def result(out: Any) -> NDArray:
        return out.float().numpy() if out.dtype in (torch.float16, torch.bfloat16) else out.numpy()

    return Call(lambda: function(q, k, v, **options), result, mode.close)
