"""The annotations, as a type checker sees them: `static_types/` holds calls and the types they must have."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fastattn
from fastattn import _typing

ROOT = Path(__file__).resolve().parents[1]
CASES = sorted((ROOT / "tests" / "static_types").glob("*.py"))


def run_mypy(*files):
    pytest.importorskip("mypy", reason="type checks need mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def test_calls_have_the_types_that_are_written_beside_them():
    result = run_mypy(*CASES)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"no issues found in {len(CASES)} source files" in result.stdout


def test_a_wrong_type_is_noticed(tmp_path):
    """Annotations that are not found would make everything Any, which nothing contradicts."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import fastattn\nreveal_type(fastattn.attention)\nfastattn.get_num_threads() + ''\n")
    result = run_mypy(wrong)
    assert result.returncode == 1
    assert 'Revealed type is "Overload(' in result.stdout
    assert "[operator]" in result.stdout


@pytest.mark.parametrize(
    ("function", "options"),
    [(fastattn.attention, _typing.AttentionOptions), (fastattn.attention_varlen, _typing.PackedOptions)],
)
def test_the_overloads_have_the_options_that_the_function_has(function, options):
    parameters = inspect.signature(function).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    assert names == options.__optional_keys__ | {"return_lse"}
