"""Builds the extension modules: one CPU detector without flags, one kernel module per instruction-set level.

Environment: FASTATTN_LEVELS=baseline,avx2 builds only some levels; FASTATTN_NO_OPENMP=1 builds without threads;
FASTATTN_NO_VECTOR_EXTENSION=1 builds the plain-loop tiles; FASTATTN_SANITIZE=address,undefined adds sanitizers;
FASTATTN_WERROR=1 turns the C++ compiler's warnings into errors.
"""

import contextlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Of the interpreter that is built for, which is not always the one that runs: cross compilers say so.
X86 = sysconfig.get_platform().endswith(("x86_64", "amd64"))
MSVC = sys.platform == "win32"

# level: (flags for GCC and Clang, flags for MSVC, the macro that these flags must define)
LEVELS: dict[str, tuple[list[str], list[str], str]] = {"baseline": ([], [], "")}
if X86:
    V3 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe"]
    V4 = [*V3, "-mavx512f", "-mavx512cd", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mprefer-vector-width=512"]
    LEVELS["avx2"] = (V3, ["/arch:AVX2"], "__AVX2__")
    LEVELS["avx512"] = (V4, ["/arch:AVX512"], "__AVX512DQ__")
    LEVELS["avx512_bf16"] = ([*V4, "-mavx512bf16"], ["/arch:AVX512"], "__AVX512BF16__")

OPTIONAL_FLAGS = [
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
    "-Wno-unused-function",
    "-Wno-psabi",
    "-Wno-unused-parameter",
    "-Wno-missing-field-initializers",
]

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "freethreading_compatible": True,
}


def wanted_levels() -> list[str]:
    chosen = os.environ.get("FASTATTN_LEVELS")
    names = chosen.split(",") if chosen else list(LEVELS)
    unknown = sorted(set(names) - set(LEVELS))
    if unknown:
        raise SystemExit(f"FASTATTN_LEVELS: {unknown} unknown here; this machine can build {list(LEVELS)}")
    return names


def extensions() -> list[Extension]:
    common = {"language": "c++", "include_dirs": ["src"], "depends": [str(p) for p in Path("src").glob("*.*")]}
    built = [Extension("fastattn._kernels.cpu", ["src/cpu.pyx"], **common)]
    built += [Extension(f"fastattn._kernels.{name}", [f"src/kernels/{name}.pyx"], **common) for name in wanted_levels()]
    return built


@contextlib.contextmanager
def child_errors_hidden() -> Iterator[None]:
    """What child processes write on standard error goes nowhere."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


class BuildWithProbes(build_ext):
    """Tries each optional flag on a few lines first, and says in one line what it does without."""

    def probe(self, flags: list[str], body: str = "int main() { return 0; }\n", link: bool = False) -> bool:
        with tempfile.TemporaryDirectory() as folder, child_errors_hidden():
            source = Path(folder, "probe.cpp")
            source.write_text(body)
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=flags)
                if link:
                    self.compiler.link_executable(objects, "probe", output_dir=folder, extra_postargs=flags)
            except Exception:
                return False
        return True

    def known(self, flags: list[str]) -> list[str]:
        """Those of the flags of GCC and Clang that this compiler knows."""
        flags = [] if MSVC else flags
        unknown = [flag for flag in flags if not self.probe([flag])]
        for flag in unknown:
            print(f"fastattn: this compiler does not know {flag}; building without it")
        return [flag for flag in flags if flag not in unknown]

    def openmp_flags(self) -> list[str]:
        flags = ["/openmp"] if MSVC else ["-fopenmp"]
        if os.environ.get("FASTATTN_NO_OPENMP") or not self.probe(flags, "#include <omp.h>\nint main() {}\n", True):
            print("fastattn: building without OpenMP, so calls run on one thread")
            return []
        return flags

    def level_flags(self, extension: Extension) -> list[str] | None:
        """The flags of a kernel module's level; None when this compiler lacks them."""
        level = extension.name.rpartition(".")[2]
        gcc_flags, msvc_flags, macro = LEVELS.get(level, ([], [], ""))
        flags = msvc_flags if MSVC else gcc_flags
        if macro and not self.probe(flags, f"#ifndef {macro}\n#error\n#endif\nint main() {{}}\n"):
            print(f"fastattn: this compiler does not know all flags of {level}; building without that level")
            return None
        return flags

    def build_extensions(self) -> None:
        compile_flags = ["/O2", "/std:c++17"] if MSVC else ["-O3", "-std=c++17", "-g0"]  # Python's own have -g
        compile_flags += self.known(OPTIONAL_FLAGS)
        openmp = self.openmp_flags()
        # Without OpenMP, variables of Cython's parallel loops are set and not read.
        compile_flags += openmp or self.known(["-Wno-unused-but-set-variable"])
        link_flags = [] if MSVC else openmp
        macros = []
        if os.environ.get("FASTATTN_NO_VECTOR_EXTENSION"):
            print("fastattn: building without compiler vectors, so tiles are plain loops")
            macros.append(("FASTATTN_NO_VECTOR_EXTENSION", "1"))
        if sanitizers := os.environ.get("FASTATTN_SANITIZE"):
            # -O1, because the passes after it merge accesses into vectors that ThreadSanitizer does not watch.
            compile_flags += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g", "-O1"]
            link_flags = [*link_flags, f"-fsanitize={sanitizers}"]
            if "address" in sanitizers:  # it watches the ends of what is allocated, not of what is kept
                macros.append(("FASTATTN_KEPT_SCRATCH", "0"))
        if os.environ.get("FASTATTN_WERROR"):
            compile_flags.append("-Werror")
        kept = []
        for extension in self.extensions:
            level_flags = self.level_flags(extension)
            if level_flags is not None:
                extension.extra_compile_args = compile_flags + level_flags
                extension.extra_link_args = link_flags
                extension.define_macros = macros
                kept.append(extension)
        # Here and not for every command: an sdist, or the question what a build needs, generates no C++.
        generated = cythonize(
            kept,
            include_path=["src"],
            compiler_directives=DIRECTIVES,
            annotate=bool(os.environ.get("FASTATTN_ANNOTATE")),
        )
        for extension, cpp in zip(kept, generated, strict=True):
            extension.sources = cpp.sources
        self.extensions = kept
        self.parallel = self.parallel or os.cpu_count()  # a level takes about a minute
        super().build_extensions()


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildWithProbes})
