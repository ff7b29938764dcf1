"""What `import fastattn` costs and changes, in a fresh process that has imported NumPy. Times are not asserted."""

import json
import platform
import sys

import pytest
from inputs import output_of

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Too slow or too large for what they would be needed for, or started for their side effects.
HEAVY = {
    "argparse", "asyncio", "concurrent.futures", "ctypes", "email", "http", "importlib.metadata", "inspect",
    "logging", "multiprocessing", "pathlib", "pkg_resources", "shutil", "socket", "subprocess", "tempfile", "unittest",
    "urllib.request", "numpy.f2py", "numpy.testing", "Cython", "hypothesis", "matplotlib", "ml_dtypes", "pandas",
    "pytest", "scipy", "threadpoolctl", "torch", "typing_extensions",
}  # fmt: skip


@pytest.fixture(scope="module")
def imported():
    """The modules that the import added, and what else it changed."""
    code = """
    import json, os, sys
    import numpy
    modules, environment, path = set(sys.modules), dict(os.environ), list(sys.path)
    import fastattn
    same = {"environment": dict(os.environ) == environment, "path": sys.path == path}
    print(json.dumps({"modules": sorted(set(sys.modules) - modules), "same": same}))
    """
    return json.loads(output_of(code))


def test_exactly_one_kernel_module_is_loaded(imported):
    kernels = [name for name in imported["modules"] if name.startswith("fastattn._kernels.")]
    assert len(kernels) == 2
    assert "fastattn._kernels.cpu" in kernels, "the detector is the other one"


def test_no_heavy_module_is_imported(imported):
    assert "fastattn._attention" in imported["modules"]
    assert HEAVY.isdisjoint(imported["modules"])
    assert "fastattn.reference" not in imported["modules"], "the oracle comes when it is asked for"


def test_the_environment_stays_as_it_was(imported):
    assert imported["same"] == {"environment": True, "path": True}


@linux_only
def test_no_thread_is_started():
    code = """
    import os
    import numpy
    threads = set(os.listdir("/proc/self/task"))
    import fastattn
    assert set(os.listdir("/proc/self/task")) == threads
    """
    output_of(code)


@linux_only
def test_memory_grows_by_less_than_ten_megabytes():
    code = """
    import gc, os
    import numpy

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    import fastattn
    print(resident() - before)
    """
    assert int(output_of(code)) < 10_000_000


@linux_only
@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the control word of SSE")
def test_the_floating_point_control_word_stays_as_it_was():
    """Its last four bytes in glibc's fenv_t: rounding, traps, and whether subnormal numbers are flushed."""
    code = """
    import ctypes
    import numpy

    def control_word():
        environment = (ctypes.c_uint32 * 8)()
        assert ctypes.CDLL(None).fegetenv(environment) == 0
        return environment[7] & ~0x3F  # without the flags of past exceptions

    before = control_word()
    import fastattn
    assert control_word() == before == 0x1F80
    """
    output_of(code)


def test_subnormal_numbers_survive_the_import_and_calls():
    code = """
    import threading
    import numpy as np
    import fastattn

    def check():
        assert np.float32(1e-45) > 0 and np.float64(5e-324) > 0
        assert np.float64(5e-324) * np.float64(1) > 0
        assert (np.full(64, 1e-40, np.float32) * np.float32(1) > 0).all()

    for _ in range(2):
        check()
        thread = threading.Thread(target=check)
        thread.start()
        thread.join()
        x = np.ones((2, 4, 200, 64), np.float32)
        fastattn.attention(x, x, x, causal=True)
    """
    output_of(code)
