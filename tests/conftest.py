"""The fixture that runs a test on every instruction-set level, and what the run says about the machine first."""

import platform
import sys
from pathlib import Path

import numpy as np
import pytest

import fastattn
from fastattn import _dispatch


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


collect_ignore = ["fuzz"]  # run by hand, under a fuzzer


def pytest_addoption(parser):
    parser.addoption("--soak-seconds", type=float, default=120, help="how long `-m soak` takes (default 120)")


def pytest_report_header():
    available, built = fastattn.available_isas(), _dispatch.built_isas()
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return [
        f"processor: {_processor()}",
        f"fastattn: active {_dispatch.kernel.isa}, available {', '.join(available)}, "
        f"built but not tested here {', '.join(name for name in built if name not in available) or 'none'}",
        f"threads: {fastattn.get_num_threads()}, OpenMP {'yes' if _dispatch.kernel.openmp else 'no'}, "
        f"GIL {'on' if gil else 'off'}, NumPy {np.__version__}",
    ]


class _Recording:
    """A kernel module that notes whether it was called."""

    def __init__(self, module):
        self._module = module
        self.calls = 0

    def __getattr__(self, name):
        if name.startswith("attention"):
            self.calls += 1
        return getattr(self._module, name)


@pytest.fixture(params=fastattn.available_isas())
def isa(request, monkeypatch):
    """The kernel module of each available level in turn, in use everywhere. A test that never calls it fails."""
    kernel = _Recording(_dispatch.load(request.param))
    users = [module for name, module in sys.modules.items() if name.startswith("fastattn.")]
    for module in users:
        if getattr(module, "kernel", None) is _dispatch.kernel and module is not _dispatch:
            monkeypatch.setattr(module, "kernel", kernel)
    monkeypatch.setattr(_dispatch, "kernel", kernel)
    yield kernel
    assert kernel.isa == request.param
    assert kernel.calls, "the test did not reach the kernel it is meant to test"
