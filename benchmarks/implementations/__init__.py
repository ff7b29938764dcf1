"""The implementations that are compared, one module each.

A module offers `NAME`, `PACKAGE` (the distribution whose version is recorded) and `prepare(case, inputs, threads)`,
which does everything a user would do once (build a graph, wrap arrays), returns a `Call`, and raises `Unsupported`
where it cannot do the case. No library is imported before its `prepare` is called. Adding a peer is adding a module to
`MODULES`.
"""

from types import ModuleType

from benchmarks.implementations import (
    _fastattn,
    _ggml,
    _numpy,
    _onnxruntime_attention,
    _onnxruntime_mha,
    _openvino,
    _torch,
)
from benchmarks.implementations._common import Call, Unsupported

MODULES: tuple[ModuleType, ...] = (
    _fastattn,
    _numpy,
    _torch,
    _onnxruntime_mha,
    _onnxruntime_attention,
    _openvino,
    _ggml,
)
IMPLEMENTATIONS: dict[str, ModuleType] = {module.NAME: module for module in MODULES}

__all__ = ["IMPLEMENTATIONS", "Call", "Unsupported"]
