"""Which kernel module a fresh process picks, and what it says when it cannot."""

import json
import platform
import shutil
import sys
from pathlib import Path

import pytest
from inputs import output_of, run_python

import fastattn
from fastattn import _dispatch

LOADED = """
import json, sys
import fastattn
from fastattn import _dispatch
loaded = sorted(n.rpartition(".")[2] for n in sys.modules if n.startswith("fastattn._kernels."))
print(json.dumps([_dispatch.kernel.isa, _dispatch.kernel.__name__, loaded, fastattn.show_config("dict")["isa_active"]]))
"""
CALL = """
import numpy as np, fastattn
from fastattn import reference
x = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4) / 24
print(abs(fastattn.attention(x, x, x) - reference.attention(x, x, x)).max())
"""
# What /proc/cpuinfo must list for each level, written down independently of the detector.
FLAGS_OF = {
    "baseline": set(),
    "avx2": {"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"},
    "avx512": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16"},
}
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("name", fastattn.available_isas())
def test_a_level_can_be_asked_for(name):
    isa, module, loaded, active = json.loads(output_of(LOADED, FASTATTN_ISA=name))
    assert isa == active == name
    assert module == f"fastattn._kernels.{name}"
    assert loaded == sorted(["cpu", name]), "exactly one kernel module is imported"
    assert float(output_of(CALL, FASTATTN_ISA=name)) < 1e-6


@pytest.mark.parametrize("name", fastattn.available_isas())
def test_a_module_says_what_it_was_compiled_for(name):
    kernel = _dispatch.load(name)
    assert kernel.isa == name
    assert kernel.vector_bits == {"baseline": 128, "avx2": 256, "avx512": 512, "avx512_bf16": 512}[name]


@pytest.mark.parametrize("forced", [None, ""])
def test_the_highest_level_is_picked(forced):
    isa, _, loaded, _ = json.loads(output_of(LOADED, FASTATTN_ISA=forced))
    assert isa == fastattn.available_isas()[-1]
    assert loaded == sorted(["cpu", isa])


@linux_only
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
def test_available_is_what_was_built_and_the_processor_lists():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    runs, needed = [], set()
    for name in _dispatch.LEVELS:
        needed |= FLAGS_OF[name]
        if needed <= flags:
            runs.append(name)
    assert fastattn.available_isas() == tuple(name for name in runs if name in _dispatch.built_isas())


@pytest.mark.parametrize(
    "name",
    ["sse9", "AVX2", " avx2", "cpu", "..cpu", *(n for n in _dispatch.LEVELS if n not in fastattn.available_isas())],
)
def test_a_level_that_cannot_be_used(name):
    result = run_python("import fastattn", FASTATTN_ISA=name)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert message.startswith(f"RuntimeError: FASTATTN_ISA={name!r} cannot be used: built are baseline")
    assert "; this machine runs baseline" in message
    assert "During handling" not in result.stderr


@pytest.fixture
def without_extensions(tmp_path):
    """The package as a checkout has it before anything is compiled."""
    folder = Path(fastattn.__file__).parent
    shutil.copytree(folder, tmp_path / "fastattn", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    for libraries in folder.parent.glob("fastattn.libs"):  # of a wheel: kernels look for libgomp beside the package
        shutil.copytree(libraries, tmp_path / libraries.name)
    return tmp_path


def test_an_unbuilt_package_says_how_to_build_it(without_extensions):
    result = run_python("import fastattn", path=without_extensions, cwd=without_extensions)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert message.startswith("ImportError: fastattn's compiled kernels are not built here: run `pip install .`")


def test_a_package_without_kernels_names_what_is_missing(without_extensions):
    """The detector was built, no kernel was: a build that went wrong half-way."""
    for library in Path(fastattn.__file__).parent.glob("_kernels/cpu.*"):
        shutil.copy(library, without_extensions / "fastattn" / "_kernels")
    result = run_python("import fastattn", path=without_extensions, cwd=without_extensions, FASTATTN_ISA=None)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert message.startswith("RuntimeError: no kernel of fastattn runs on this machine: built are none; this machine")


def test_the_baseline_alone_is_enough(without_extensions):
    for pattern in ("cpu.*", "baseline.*"):
        for library in Path(fastattn.__file__).parent.glob(f"_kernels/{pattern}"):
            shutil.copy(library, without_extensions / "fastattn" / "_kernels")
    isa, *_ = json.loads(output_of(LOADED, path=without_extensions, cwd=without_extensions, FASTATTN_ISA=None))
    assert isa == "baseline"
