"""Coverage-guided fuzzing of the command line and its reader: any bytes, against a reader of twenty plain lines.

Needs atheris. ``python tests/fuzz/text.py -max_total_time=300 [CORPUS]`` takes libFuzzer's options.
"""

import contextlib
import io
import math
import re
import sys
from pathlib import Path

import atheris
import numpy as np

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
with atheris.instrument_imports(include=["fastattn"]):
    from fastattn import __main__ as command_line
    from fastattn._text import TextProblemError, parse_problem

NUMBER = re.compile(rb"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
SEEDS = [
    b"2 4 2\n1 0 0 1\n0 1 1 0\n\n1 0 -.5 1e0\n0 1 1 0\n1 2 3 4\n5 6 7 8.25\n",
    b"\xef\xbb\xbf1 1 1\r\n1.\r\n+2\r\n-3e-3\r\n",
    b"999999999999999999 1 1\n1\n",
    b"1 1000000000 1000000000\n" + b"1 " * 40,
    b"3 1 1\n" + b"123456789012345678901\n0.1234567890123456\n1e308\n" * 3,
]
figures = {"texts": 0, "solved": 0}


def read_plainly(data):
    """The (q, k, v, n_heads) that the text spells, or None."""
    rows = [words for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if (words := line.split())]
    if not rows or len(rows[0]) != 3 or not all(word.isdigit() and len(word) < 4000 for word in rows[0]):
        return None
    n, d, n_heads = map(int, rows[0])
    if min(n, d, n_heads) < 1 or max(n, d, n_heads) >= 10**18 or d % n_heads or len(rows) != 3 * n + 1:
        return None
    if any(len(row) != d or not all(map(NUMBER.fullmatch, row)) for row in rows[1:]):
        return None
    numbers = [float(word) for row in rows[1:] for word in row]
    return None if any(map(math.isinf, numbers)) else (*np.array(numbers).reshape(3, n, d), n_heads)


def one_text(data):
    figures["texts"] += 1
    expected = read_plainly(data)
    try:
        problem, message = parse_problem(io.BytesIO(data)), ""
    except TextProblemError as error:
        problem, message = None, str(error)
    assert (problem is None) == (expected is None), message or "read what is no problem"
    if problem is None:
        assert re.fullmatch("line [0-9]+: expected .*, got .*", message), message
        assert message.isprintable(), message
    else:
        assert problem[3] == expected[3]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(problem[:3], expected[:3], strict=True))
    out, err = io.StringIO(), io.StringIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(data))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = command_line.main([])
    if expected is None:
        assert (status, out.getvalue()) == (2, "")
        assert err.getvalue().startswith("fastattn: <stdin>: line ")
        assert err.getvalue().count("\n") == 1
    else:
        figures["solved"] += 1
        assert (status, err.getvalue()) == (0, "")
        assert out.getvalue().count("\n") == len(expected[0])
    if figures["texts"] % 5000 == 0:
        print(figures, file=sys.__stdout__, flush=True)


def mutate(data, max_size, seed):
    """Begin with good problems; the fuzzer's own changes do the rest."""
    return atheris.Mutate(data if len(data) > 4 else SEEDS[seed % len(SEEDS)], max_size)


atheris.Setup(["text", "-max_len=400", *sys.argv[1:]], one_text, custom_mutator=mutate)
atheris.Fuzz()
