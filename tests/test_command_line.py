"""The command line as a user meets it: what it prints where, and its exit status."""

import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fastattn
from fastattn import __main__ as command_line

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "two_heads.txt"
ANSWER = "[2.3210 3.3210 4.3210 5.3210]\n[3.6790 4.6790 5.6790 6.6790]\n"
COMMAND = [sys.executable, "-m", "fastattn"]
LONG_ANSWER = b"100 2000 1\n" + (b"1 " * 2000 + b"\n") * 300  # longer than what a pipe holds


def run(*arguments: str, text: bytes = b"") -> tuple[int, str, str]:
    """Run the command; return its exit status, standard output and standard error."""
    done = subprocess.run([*COMMAND, *arguments], input=text, capture_output=True, cwd=ROOT, timeout=120)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def feed(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def call(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, str, str]:
    """Like `run`, in this process."""
    status = command_line.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def solve_plainly(q: np.ndarray, k: np.ndarray, v: np.ndarray, n_heads: int) -> np.ndarray:
    """Multi-head attention head by head, as one would write it on paper."""
    outs = []
    for q_head, k_head, v_head in zip(*(np.split(array, n_heads, axis=1) for array in (q, k, v)), strict=True):
        scores = q_head @ k_head.T / np.sqrt(q_head.shape[1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        outs.append(weights / weights.sum(axis=1, keepdims=True) @ v_head)
    return np.concatenate(outs, axis=1)


@pytest.mark.parametrize("arguments", [[], ["-"], [str(EXAMPLE)]])
def test_worked_example(arguments: list[str]) -> None:
    assert run(*arguments, text=EXAMPLE.read_bytes()) == (0, ANSWER, "")


def test_worked_example_through_the_console_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["fastattn"]
    module, _, function = entry.partition(":")
    monkeypatch.setattr(sys, "argv", ["fastattn", str(EXAMPLE)])
    assert getattr(importlib.import_module(module), function)() == 0
    assert capsys.readouterr() == (ANSWER, "")


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    fastattn.show_config()
    expected = capsys.readouterr().out
    assert expected
    assert call(capsys, ["info"]) == (0, expected, "")


def test_a_file_called_info(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "info").write_bytes(EXAMPLE.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert call(capsys, ["./info"]) == (0, ANSWER, "")


def test_version() -> None:
    assert run("--version") == (0, f"fastattn {fastattn.__version__}\n", "")


def test_help() -> None:
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    assert out.startswith("usage: fastattn [-h] [--version] [FILE]\n")
    assert "multi-head attention" in " ".join(out.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "line 1: expected three positive integers n d h, got the end of the file"),
        (b"1 4 3\n", "line 1: expected h to divide d, got d = 4 and h = 3"),
        (b"1 2 1\n\n1 2\n1 2 3\n", "line 4: expected 2 numbers in row 1 of K, got 3"),
        (b"1 1 1\n1\n\x00\n1\n", r"line 3: expected a decimal number as word 1 of row 1 of K, got '\x00'"),
        (b"1 1 1\n1\n1\n\xff\n", r"line 4: expected a decimal number as word 1 of row 1 of V, got '\xff'"),
        (b"1 1 1\n1\n1\n1e999", "line 4: expected a number that float64 can hold as word 1 of row 1 of V, got '1e999'"),
        (b"1 1 1\n1\n1\n1\n1\n", "line 5: expected the end of the file after row 1 of V, got '1'"),
        (b"1" * 5000 + b" 1 1\n", f"line 1: expected n, d and h below 10**18, got '{'1' * 32}'... (5004 bytes)"),
        (b"9" * 18 + b" 1 1\n1\n", "line 3: expected row 2 of Q, got the end of the file"),
    ],
    ids=["empty", "heads", "long row", "NUL", "no UTF-8", "overflow", "trailing", "digits", "enormous"],
)
def test_faults_in_the_text(
    text: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, text)
    assert call(capsys, []) == (2, "", f"fastattn: <stdin>: {message}\n")
    path = tmp_path / "problem.txt"
    path.write_bytes(text)
    assert call(capsys, [str(path)]) == (2, "", f"fastattn: {path}: {message}\n")


def test_fault_in_a_process_of_its_own() -> None:
    message = "line 1: expected three positive integers n d h, got 'h d n'"
    assert run(text=b"h d n\n1\n") == (2, "", f"fastattn: <stdin>: {message}\n")


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "missing.txt"
    assert run(str(path)) == (2, "", f"fastattn: {path}: cannot read it: No such file or directory\n")


def test_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, [str(tmp_path)]) == (2, "", f"fastattn: {tmp_path}: cannot read it: Is a directory\n")


def test_unreadable_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(file: str, mode: str) -> io.BytesIO:
        raise PermissionError(13, "Permission denied", file)

    monkeypatch.setattr(command_line, "open", refuse, raising=False)  # the superuser may read everything
    assert call(capsys, ["secret"]) == (2, "", "fastattn: secret: cannot read it: Permission denied\n")


def test_file_name_with_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    message = r"fastattn: no\nsuch\x1b\u202e\udcff: cannot read it: No such file or directory" + "\n"
    assert call(capsys, ["no\nsuch\x1b\u202e\udcff"]) == (2, "", message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one", "two"], "unrecognized arguments: two"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["info", "more\nmore"], r"unrecognized arguments: more\nmore"),
    ],
)
def test_wrong_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", f"fastattn: {message} (see fastattn --help)\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), f"{EXAMPLE}: not enough memory for a problem of this size"),
        (RuntimeError("this processor will not do"), "this processor will not do"),
    ],
)
def test_failure_of_the_computation(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(command_line, "multi_head_attention", fail)
    assert call(capsys, [str(EXAMPLE)]) == (2, "", f"fastattn: {message}\n")


@pytest.mark.parametrize(
    ("stream", "text", "message"),
    [
        ("stdin", b"", "fastattn: <stdin>: cannot read it: standard input is closed\n"),
        ("stdout", EXAMPLE.read_bytes(), "fastattn: standard output is closed\n"),
        ("stderr", b"no problem", ""),
    ],
)
def test_closed_standard_stream(
    stream: str, text: bytes, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, text)
    monkeypatch.setattr(sys, stream, None)
    assert call(capsys, []) == (2, "", message)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("n_lines", [0, 1])
def test_reader_that_goes_away(n_lines: int, unbuffered: str, tmp_path: Path) -> None:
    path = tmp_path / "problem.txt"
    path.write_bytes(LONG_ANSWER)
    with subprocess.Popen(
        [*COMMAND, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert all(process.stdout.readline().startswith(b"[1.0000 1.0000 ") for _ in range(n_lines))
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 0


def test_output_that_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, str(EXAMPLE)], stdout=full, stderr=subprocess.PIPE, cwd=ROOT, timeout=120)
    assert done.returncode == 2
    assert done.stderr == b"fastattn: cannot write the output: No space left on device\n"


def test_interrupt() -> None:
    # Signals may be ignored where the tests run, and a child inherits that.
    code = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('fastattn', run_name='__main__')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        # A pipe holds far less than this: once it is written, the command is reading.
        process.stdin.write(b"1 1 1\n" + b"\n" * 4_000_000)
        process.stdin.flush()
        # Standard input stays open meanwhile, so that only the signal can end the command. One that comes just before
        # the command blocks in a read is noticed only after it: so, as a person would, press again.
        for _ in range(120):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
                break
        assert process.returncode == 130
        assert process.stdout is not None
        assert process.stderr is not None
        assert (process.stdout.read(), process.stderr.read()) == (b"", b"")


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[np.ndarray], int]:
    n = draw(st.integers(1, 12))
    n_heads = draw(st.integers(1, 4))
    d = n_heads * draw(st.integers(1, 5))
    numbers = st.integers(-9999, 9999).map(lambda value: value / 1000)
    return [draw(arrays(np.float64, (n, d), elements=numbers)) for _ in "qkv"], n_heads


@settings(deadline=None)
@given(problem=problems(), template=st.sampled_from(["%.3f", "%r", "%+.7e", "%10.4f"]))
def test_random_problems(problem: tuple[list[np.ndarray], int], template: str) -> None:
    (q, k, v), n_heads = problem
    lines = [f"{q.shape[0]} {q.shape[1]} {n_heads}"]
    lines += [" ".join(template % value for value in row) for array in (q, k, v) for row in array.tolist()]
    with pytest.MonkeyPatch.context() as monkeypatch:
        feed(monkeypatch, "\n".join(lines).encode())
        output = io.StringIO()
        monkeypatch.setattr(sys, "stdout", output)
        assert command_line.main([]) == 0
    rows = output.getvalue().splitlines()
    assert all(row[0] + row[-1] == "[]" for row in rows)
    printed = [row[1:-1].split(" ") for row in rows]
    assert all(len(word.partition(".")[2]) == 4 for row in printed for word in row)
    # Half a unit of the last decimal, and the rounding of the computation itself.
    np.testing.assert_allclose(np.array(printed, float), solve_plainly(q, k, v, n_heads), rtol=0, atol=0.5e-4 + 1e-9)


def test_results_beyond_float64() -> None:
    assert run(text=b"2 1 1\n1e200\n0\n1e200\n0\n-7\n-7\n") == (0, "[nan]\n[-7.0000]\n", "")
