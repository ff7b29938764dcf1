"""The text form of a problem: what is read, what is refused and in which words, how an answer is written."""

import io
import math
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fastattn import _text
from fastattn._text import Problem, TextProblemError, format_rows, parse_problem

EXAMPLE = Path(__file__).parents[1] / "examples" / "two_heads.txt"
GOOD = b"2 4 2\n1 0 0 1\n0 1 1 0\n1 0 0 1\n0 1 1 0\n1 2 3 4\n5 6 7 8\n"
ROWS = GOOD.partition(b"\n")[2]
BOM = b"\xef\xbb\xbf"


def parse(text: bytes) -> Problem:
    return parse_problem(io.BytesIO(text))


def refusal(text: bytes) -> str:
    with pytest.raises(TextProblemError) as caught:
        parse(text)
    return str(caught.value)


def assert_is_example(problem: Problem) -> None:
    assert problem.n_heads == 2
    np.testing.assert_array_equal(problem.q, [[1, 0, 0, 1], [0, 1, 1, 0]])
    np.testing.assert_array_equal(problem.k, problem.q)
    np.testing.assert_array_equal(problem.v, [[1, 2, 3, 4], [5, 6, 7, 8]])
    assert all(array.dtype == np.float64 for array in problem[:3])


def parse_slowly(text: bytes) -> list[float] | None:
    """Read a problem word by word, straight from the specification; None if it is to be refused."""
    lines = [line.split() for line in text.removeprefix(BOM).split(b"\n")]
    lines = [words for words in lines if words]
    if not lines or len(lines[0]) != 3 or not all(re.fullmatch(rb"[0-9]+", word) for word in lines[0]):
        return None
    n, d, n_heads = (int(word) for word in lines[0])
    if not (n and d and n_heads) or d % n_heads or len(lines) != 1 + 3 * n or any(len(row) != d for row in lines[1:]):
        return None
    words = [word for row in lines[1:] for word in row]
    if not all(re.fullmatch(rb"[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?", word) for word in words):
        return None
    values = [float(word) for word in words]
    return values if all(map(math.isfinite, values)) else None


def test_worked_example() -> None:
    assert EXAMPLE.read_bytes() == GOOD
    assert_is_example(parse(GOOD))


@pytest.mark.parametrize(
    "text",
    [
        GOOD.rstrip(b"\n"),
        GOOD.replace(b"\n", b"\r\n"),
        GOOD.replace(b"\n", b"\n\n \t\n"),
        b"\n\n" + GOOD + b"\n \n\r\n",
        BOM + GOOD,
        BOM + b"\r\n" + GOOD,
        GOOD.replace(b" ", b"\t"),
        GOOD.replace(b" ", b" \t  ").replace(b"\n", b" \n "),
        GOOD.replace(b"2 4 2", b"002 04 2"),
        GOOD.replace(b"1 0 0 1", b"+1 0. .0 1e0"),
        GOOD.replace(b"1 0 0 1", b"1.000 -0 0e9 10E-1"),
        GOOD.replace(b"1 0 0 1", b"0.1e+1 -.0 +0.0 100e-2"),
        GOOD.replace(b"1 0 0 1", b"00000000000000000001 0 0 1.00000000000000000000"),
    ],
)
def test_other_ways_to_write_the_example(text: bytes) -> None:
    assert_is_example(parse(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "line 1: expected three positive integers n d h, got the end of the file"),
        (BOM, "line 2: expected three positive integers n d h, got the end of the file"),
        (b"\n \n\r\n", "line 4: expected three positive integers n d h, got the end of the file"),
        (b"2 4\n" + ROWS, "line 1: expected three positive integers n d h, got '2 4'"),
        (b"\n2 4 2 1\n" + ROWS, "line 2: expected three positive integers n d h, got '2 4 2 1'"),
        (b"2 x 2\n" + ROWS, "line 1: expected three positive integers n d h, got '2 x 2'"),
        (b"2 4 0\n" + ROWS, "line 1: expected three positive integers n d h, got '2 4 0'"),
        (b"0 4 2\n", "line 1: expected three positive integers n d h, got '0 4 2'"),
        (b"2 -4 2\n" + ROWS, "line 1: expected three positive integers n d h, got '2 -4 2'"),
        (b"+2 4 2\n" + ROWS, "line 1: expected three positive integers n d h, got '+2 4 2'"),
        (b"2.0 4 2\n" + ROWS, "line 1: expected three positive integers n d h, got '2.0 4 2'"),
        (b"2 4_0 2\n" + ROWS, "line 1: expected three positive integers n d h, got '2 4_0 2'"),
        ("２ 4 2\n".encode(), "line 1: expected three positive integers n d h, got '２ 4 2'"),
        (b"\xff\xfe2\x00\n", r"line 1: expected three positive integers n d h, got '\xff\xfe2\x00'"),
        (b"\x00" * 99, "line 1: expected three positive integers n d h, got '" + r"\x00" * 32 + "'... (99 bytes)"),
        (b"2 4 3\n" + ROWS, "line 1: expected h to divide d, got d = 4 and h = 3"),
        (b"2 4 8\n" + ROWS, "line 1: expected h to divide d, got d = 4 and h = 8"),
        (b"1000000000000000000 4 2\n", "line 1: expected n, d and h below 10**18, got '1000000000000000000 4 2'"),
        (b"2 4 2\n", "line 2: expected row 1 of Q, got the end of the file"),
        (b"\n2 4 2\n\n1 0 0 1\n\n", "line 6: expected row 2 of Q, got the end of the file"),
        (GOOD[:-8], "line 7: expected row 2 of V, got the end of the file"),
        (GOOD[:-9], "line 7: expected row 2 of V, got the end of the file"),
        (b"999999999999999999 4 2\n" + ROWS, "line 8: expected row 7 of Q, got the end of the file"),
        (b"2 999999999999999999 1\n" + ROWS, "line 2: expected 999999999999999999 numbers in row 1 of Q, got 4"),
        (b"2 1 1\n" + ROWS, "line 2: expected 1 number in row 1 of Q, got 4"),
        (GOOD.replace(b"1 2 3 4", b"1 2 3"), "line 6: expected 4 numbers in row 1 of V, got 3"),
        (GOOD.replace(b"1 2 3 4", b"1 2 3 4 5"), "line 6: expected 4 numbers in row 1 of V, got 5"),
        (GOOD.replace(b"5 6 7 8", b"\r\n\n5 6 7"), "line 9: expected 4 numbers in row 2 of V, got 3"),
        (GOOD.replace(b"2 3 4\n", b"2\n3 4 "), "line 6: expected 4 numbers in row 1 of V, got 2"),
        (b"2 4 2\r1 0 0 1\n", r"line 1: expected three positive integers n d h, got '2 4 2\r1 0 0 1'"),
        (GOOD + b"9\n", "line 8: expected the end of the file after row 2 of V, got '9'"),
        (GOOD + b"\n\n1 2 3 4\n", "line 10: expected the end of the file after row 2 of V, got '1 2 3 4'"),
        (GOOD + b"\x00", r"line 8: expected the end of the file after row 2 of V, got '\x00'"),
        (GOOD + BOM, r"line 8: expected the end of the file after row 2 of V, got '\ufeff'"),
        (GOOD + GOOD, "line 8: expected the end of the file after row 2 of V, got '2 4 2'"),
    ],
)
def test_refused_layout(text: bytes, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        (b"x", "'x'"),
        (b"nan", "'nan'"),
        (b"-NaN", "'-NaN'"),
        (b"inf", "'inf'"),
        (b"Infinity", "'Infinity'"),
        (b"0x1p3", "'0x1p3'"),
        (b"0x10", "'0x10'"),
        (b"1_000", "'1_000'"),
        (b"1,5", "'1,5'"),
        (b"1d5", "'1d5'"),
        (b"1j", "'1j'"),
        (b".", "'.'"),
        (b"-", "'-'"),
        (b"+.", "'+.'"),
        (b"+-1", "'+-1'"),
        (b"1-2", "'1-2'"),
        (b"1.2.3", "'1.2.3'"),
        (b"1..2", "'1..2'"),
        (b"e5", "'e5'"),
        (b".e5", "'.e5'"),
        (b"1e", "'1e'"),
        (b"1e5.0", "'1e5.0'"),
        (b"1ee5", "'1ee5'"),
        ("٣".encode(), "'٣'"),
        ("−1".encode(), "'−1'"),
        ("1\u00a02".encode(), r"'1\xa02'"),
        ("\u202e1".encode(), r"'\u202e1'"),
        (b"\x00", r"'\x00'"),
        (b"1\x1b[31m", r"'1\x1b[31m'"),
        (b"\xff1", r"'\xff1'"),
        (b"'", '''"'"'''),
        (b"q" * 40, "'" + "q" * 40 + "'"),
        (b"q" * 41, "'" + "q" * 32 + "'... (41 bytes)"),
        (b"\xc3\xa9" * 400, "'" + r"\xc3\xa9" * 16 + "'... (800 bytes)"),
    ],
)
def test_refused_word(word: bytes, quoted: str) -> None:
    text = GOOD.replace(b"5 6 7 8", b"\n5 6 " + word + b" nan")
    assert refusal(text) == f"line 8: expected a decimal number as word 3 of row 2 of V, got {quoted}"


@pytest.mark.parametrize("word", [b"1e999", b"-1e309", b"+1E+0400", b"1.8e308", b"9" * 310])
def test_refused_overflow(word: bytes) -> None:
    message = refusal(GOOD.replace(b"1 2 3 4", b"1 " + word + b" 3 4"))
    assert message.startswith("line 6: expected a number that float64 can hold as word 2 of row 1 of V, got '")


def test_word_is_judged_before_the_length_of_its_row() -> None:
    assert "word 2 of row 1 of V, got 'two'" in refusal(GOOD.replace(b"1 2 3 4", b"1 two"))


@pytest.mark.parametrize("word", [b"1.7976931348623157e308", b"5e-324", b"1e-999", b"0e999", b"." + b"3" * 400])
def test_extreme_numbers_are_read(word: bytes) -> None:
    assert parse(b"1 1 1 " + b"\n1" * 2 + b"\n" + word).v.item() == float(word)


def test_fault_after_the_first_batch() -> None:
    n = _text._BATCH_BYTES
    text = b"%d 1 1\n" % n + b"\n1\n" * (3 * n)
    assert parse(text).v.shape == (n, 1)
    assert refusal(text + b"2") == f"line {6 * n + 2}: expected the end of the file after row {n} of V, got '2'"
    assert refusal(text[:-2]) == f"line {6 * n + 1}: expected row {n} of V, got the end of the file"
    place = text.index(b"1", 5 * n)
    row = (place - text.index(b"\n")) // 3 + 1
    expected = f"line {2 * row + 1}: expected a decimal number as word 1 of row {row - n} of K, got 'z'"
    assert refusal(text[:place] + b"z" + text[place + 1 :]) == expected


def test_batch_of_blank_lines() -> None:
    assert_is_example(parse(GOOD.replace(b"\n", b"\n" * _text._BATCH_BYTES)))


@pytest.mark.parametrize(
    "header",
    [
        b"999999999999999999 1 1",
        b"1 999999999999999999 1",
        b"999999999999999999 999999999999999999 999999999999999999",
        b"9" * 5000 + b" 1 1",
        b"1 1 " + b"9" * 5000,
    ],
    ids=["n", "d", "all", "digits of n", "digits of h"],
)
def test_enormous_counts_take_no_memory(header: bytes) -> None:
    tracemalloc.start()
    try:
        message = refusal(header + b"\n1\n")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert len(message) < 200


def test_million_digits() -> None:
    digits = b"7" * 1_000_000
    assert refusal(digits + b" 1 1\n") == (
        f"line 1: expected n, d and h below 10**18, got '{'7' * 32}'... (1000004 bytes)"
    )
    assert refusal(b"1 1 1\n" + digits).endswith(f"as word 1 of row 1 of Q, got '{'7' * 32}'... (1000000 bytes)")
    assert parse(b"0" * 1_000_000 + b"1 1 1\n1\n1\n1").n_heads == 1


finite = st.floats(allow_nan=False, allow_infinity=False)
plain = st.from_regex(rb"[+-]?([0-9]{1,20}[.]?[0-9]{0,20}|[.][0-9]{1,20})([eE][+-]?[0-9]{1,3})?", fullmatch=True)
written = st.one_of(
    plain,
    finite.map(lambda value: repr(value).encode()),
    finite.map(lambda value: b"%.4f" % value),
    st.decimals(-(10**6), 10**6, places=4).map(lambda value: str(value).encode()),
    st.integers(-(10**16), 10**16).map(lambda value: b"%d" % value),
)


@settings(deadline=None)
@given(st.lists(written, min_size=1, max_size=20))
@example([b"-0", b"-0.0", b"-.0"])
@example([b"9007199254740993", b"0.999999999999999", b"-999999999999999", b"+.000000000000001"])
def test_every_number_is_the_nearest_float64(words: list[bytes]) -> None:
    expected = [float(word) for word in words]
    assume(all(map(math.isfinite, expected)))
    zeros = b"\n" + b"0 " * len(words)
    values = parse(b"1 %d 1" % len(words) + zeros * 2 + b"\n" + b" ".join(words)).v[0].tolist()
    assert [value.hex() for value in values] == [value.hex() for value in expected]


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(text: bytes) -> None:
    assert_reads_like_the_specification(text)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([b"1", b"2", b"-", b"+", b".", b"e", b"0", b" ", b"\n", b"\r", b"\f"]), max_size=30))
def test_random_rows(pieces: list[bytes]) -> None:
    assert_reads_like_the_specification(b"1 2 1\n0 0\n0 0\n" + b"".join(pieces))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damaged_example(data: st.DataObject) -> None:
    text = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text)))
        removed = data.draw(st.integers(0, 2))
        text[place : place + removed] = data.draw(
            st.one_of(st.binary(max_size=2), st.sampled_from([b"\n", b" ", b"1", b".", b"-", b"e", b"\r\n"]))
        )
    assert_reads_like_the_specification(bytes(text))


def assert_reads_like_the_specification(text: bytes) -> None:
    expected = parse_slowly(text)
    if expected is None:
        message = refusal(text)
        assert re.match(r"line [0-9]+: expected .+, got .", message)
        assert message.isprintable()
    else:
        assert np.concatenate(parse(text)[:3]).ravel().tolist() == expected


def test_rows_of_the_worked_example() -> None:
    rows = np.array([[2.32104, 3.32104], [3.67896, -4.67896]])
    assert list(format_rows(rows)) == ["[2.3210 3.3210]\n", "[3.6790 -4.6790]\n"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0.0000"),
        (-0.0, "0.0000"),
        (-1e-300, "0.0000"),
        (-0.00004999, "0.0000"),
        (-0.00005, "-0.0001"),  # the float64 nearest to -0.00005 lies beyond it
        (0.03125, "0.0312"),  # exactly half-way, to even
        (0.09375, "0.0938"),
        (-10.00001, "-10.0000"),
        (1e22, "10000000000000000000000.0000"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
    ],
)
def test_format_of_one_number(value: float, expected: str) -> None:
    assert list(format_rows(np.array([[value]]))) == [f"[{expected}]\n"]


@settings(deadline=None)
@given(st.lists(st.floats(), min_size=1, max_size=8))
def test_format_is_that_of_python(values: list[float]) -> None:
    expected = " ".join(format(value, ".4f") for value in values).replace("-0.0000", "0.0000")
    assert list(format_rows(np.array([values]))) == [f"[{expected}]\n"]
