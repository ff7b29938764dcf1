"""The house rules that no linter knows: sizes, open tasks, build flags. Prints what breaks them, and then exits with 1.

Run from the root of a git checkout: python3 .ci/house.py
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60
LINE_LENGTH = 120
CODE = {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".hpp"}
CYTHON = {".pyx", ".pxi"}
BUILD_FILES = {"setup.py", "pyproject.toml"}
FORBIDDEN_FLAGS = re.compile(r"-(?:ffast-math|Ofast|ffinite-math-only|fassociative-math|funsafe-math|march=native)")


def cython_functions(lines: list[str]) -> Iterator[tuple[str, int]]:
    """Yield (first line, length) of each function: it ends before the next line that is not indented deeper."""
    for start, line in enumerate(lines):
        if not re.match(r"\s*(cdef|cpdef|def)\b.*\w\(", line):
            continue
        indent = len(line) - len(line.lstrip())
        signature_end = next((i for i in range(start, len(lines)) if re.search(r":\s*(#.*)?$", lines[i])), start)
        end = signature_end
        for i in range(signature_end + 1, len(lines)):
            if lines[i].strip():
                if len(lines[i]) - len(lines[i].lstrip()) <= indent:
                    break
                end = i
        yield line.strip(), end - start + 1


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield (name, length without the docstring) of each function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documentation = ast.get_docstring(node, clean=False)
            skipped = documentation.count("\n") + 1 if documentation else 0
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1 - skipped


def complaints(path: Path, text: str) -> Iterator[str]:
    """Yield one line for each rule that a file breaks."""
    lines = text.splitlines()
    if len(lines) > FILE_LINES:
        yield f"{path}: {len(lines)} lines, {FILE_LINES} are allowed"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_LENGTH:
            yield f"{path}:{number}: {len(line)} characters, {LINE_LENGTH} are allowed"
        if re.search(r"\b(TODO|FIXME|XXX)\b(?!.*#\d)", line):  # "TODO #1" names its issue
            yield f"{path}:{number}: a task without an issue number"
        if path.name in BUILD_FILES and (flag := FORBIDDEN_FLAGS.search(line)):
            yield f"{path}:{number}: {flag[0]}: NaN, infinity and every machine are part of the contract"
    functions = cython_functions(lines) if path.suffix in CYTHON else ()
    for name, length in python_functions(text) if path.suffix == ".py" else functions:
        if length > FUNCTION_LINES:
            yield f"{path}: {name}: {length} lines, {FUNCTION_LINES} are allowed"


def main() -> int:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    checked = [Path(name) for name in tracked if Path(name).suffix in CODE or name == "pyproject.toml"]
    found = [line for path in checked for line in complaints(path, path.read_text(encoding="utf-8"))]
    print(*found, f"{len(checked)} files checked", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
