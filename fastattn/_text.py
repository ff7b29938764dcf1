"""The text form of a multi-head attention problem: reading one and writing its answer.

A problem is a line ``n d h`` followed by the n rows of Q, of K and of V, d numbers each::

    2 4 2
    1 0 0 1
    0 1 1 0
    ...

Numbers are plain decimals with an optional exponent, separated by white space. Blank lines are skipped, and line
numbers in messages count them. Nothing here trusts the counts of the first line with memory: storage grows with
the text that was really there.
"""

import math
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]

# Text is taken in batches of whole lines of about this many bytes: small enough for the arrays that describe a
# batch to stay in cache, large enough to hide the cost of a NumPy call.
_BATCH_BYTES = 1 << 17

_NUMBER_OR_SPACE = b"0123456789.+-eE \t\n\r\v\f"
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_COUNT_LIMIT = 10**18  # no file holds this many numbers

# An integer of at most 15 digits and a power of ten up to 10**22 are both exact in float64, so that their quotient,
# rounded once, is the float64 nearest to the decimal (Clinger, "How to read floating point numbers accurately", 1990).
_EXACT_DIGITS = 15
_POWERS_OF_TEN = np.array([float(10**exponent) for exponent in range(_EXACT_DIGITS + 1)])


class TextProblemError(ValueError):
    """The text is not a multi-head attention problem; the message names the line, what was expected and what came."""


class Problem(NamedTuple):
    """A multi-head attention problem: ``q``, ``k`` and ``v`` are float64 of shape (n, d), ``n_heads`` divides d."""

    q: Float64Array
    k: Float64Array
    v: Float64Array
    n_heads: int


def parse_problem(stream: BinaryIO) -> Problem:
    r"""Read a multi-head attention problem in text form.

    Parameters
    ----------
    stream : binary file
        An open binary file, positioned at the start of the text. It is read to its end, a batch of lines at a time.

    Returns
    -------
    Problem
        ``(q, k, v, n_heads)``; every number is the float64 nearest to the decimal in the text.

    Raises
    ------
    TextProblemError
        If the text is anything but one problem; the message starts with the number of the line at fault.

    Examples
    --------
    >>> import io
    >>> q, k, v, n_heads = parse_problem(io.BytesIO(b"1 2 1\n1 0\n.5 -2e3\n3 4\n"))
    >>> print(q, k, v, n_heads)
    [[1. 0.]] [[ 5.e-01 -2.e+03]] [[3. 4.]] 1
    """
    n_lines, (n, d, n_heads) = _parse_header(stream)
    rows = _RowReader(n, d, n_lines)
    while lines := stream.readlines(_BATCH_BYTES):
        rows.add(lines)
    return Problem(*rows.finish(), n_heads)


def format_rows(rows: Float64Array) -> Iterator[str]:
    r"""Format the rows of an answer, one line each: ``[2.3210 3.3210 4.3210 5.3210]``.

    Parameters
    ----------
    rows : array of shape (n, d), float64
        The answer.

    Yields
    ------
    str
        One row with its line end. Every number is ``format(x, ".4f")``, except that zero has no sign.

    Examples
    --------
    >>> list(format_rows(np.array([[2.32104, -1e-9], [0.0, float("inf")]])))
    ['[2.3210 0.0000]\n', '[0.0000 inf]\n']
    """
    template = "[" + " ".join(["%.4f"] * rows.shape[1]) + "]\n"
    for row in rows:
        # Four decimals and a leading minus cannot be part of a longer number.
        yield (template % tuple(row.tolist())).replace("-0.0000", "0.0000")


def _parse_header(stream: BinaryIO) -> tuple[int, tuple[int, int, int]]:
    """Return the number of lines read and ``(n, d, h)``."""
    expected = "three positive integers n d h"
    line_number = 0
    for line_number, line in enumerate(stream, start=1):
        text = line.removeprefix(b"\xef\xbb\xbf") if line_number == 1 else line
        words = text.split()
        if not words:
            continue
        counts = [_parse_count(word) for word in words]
        if len(counts) != 3 or min(counts) < 1:
            _fail(line_number, expected, _quote(text.strip()))
        n, d, n_heads = counts
        if max(counts) >= _COUNT_LIMIT:
            _fail(line_number, "n, d and h below 10**18", _quote(text.strip()))
        if d % n_heads:
            _fail(line_number, "h to divide d", f"d = {d} and h = {n_heads}")
        return line_number, (n, d, n_heads)
    _fail(line_number + 1, expected, "the end of the file")


def _parse_count(word: bytes) -> int:
    """Return the count that `word` spells, at most `_COUNT_LIMIT`, or 0 if it spells none."""
    if not word.isdigit():
        return 0
    digits = word.lstrip(b"0") or b"0"
    return int(digits) if len(digits) <= 18 else _COUNT_LIMIT


class _RowReader:
    """Collects the 3 n rows of d numbers that follow the first line."""

    def __init__(self, n: int, d: int, n_lines: int) -> None:
        self.n = n
        self.d = d
        self.n_rows = 0
        self.n_lines = n_lines
        self.parts: list[Float64Array] = []

    def add(self, lines: list[bytes]) -> None:
        """Take whole lines of text."""
        batch = _parse_rows(lines, self.d)
        if batch is not None and self.n_rows + batch.size // self.d <= 3 * self.n:
            self.parts.append(batch)
            self.n_rows += batch.size // self.d
            self.n_lines += len(lines)
            return
        for line in lines:
            self.n_lines += 1
            if words := line.split():
                self.parts.append(self._parse_row(line, words))
                self.n_rows += 1

    def finish(self) -> tuple[Float64Array, Float64Array, Float64Array]:
        """Return Q, K and V once the text has ended."""
        if self.n_rows < 3 * self.n:
            _fail(self.n_lines + 1, self._row_name(), "the end of the file")
        q, k, v = np.concatenate(self.parts).reshape(3, self.n, self.d)
        return q, k, v

    def _parse_row(self, line: bytes, words: list[bytes]) -> Float64Array:
        if self.n_rows == 3 * self.n:
            _fail(self.n_lines, f"the end of the file after row {self.n} of V", _quote(line.strip()))
        # float() alone would take nan, inf and underscores.
        row = None if line.translate(None, _NUMBER_OR_SPACE) else _parse_words(words)
        if row is None:
            self._refuse_word(words)
        if row.size != self.d:
            numbers = "1 number" if self.d == 1 else f"{self.d} numbers"
            _fail(self.n_lines, f"{numbers} in {self._row_name()}", str(row.size))
        return row

    def _refuse_word(self, words: list[bytes]) -> NoReturn:
        """Name the first word that is no number or that float64 cannot hold; there must be one."""
        position, word = next(
            (position, word)
            for position, word in enumerate(words, start=1)
            if not _NUMBER.fullmatch(word) or math.isinf(float(word))
        )
        kind = "a number that float64 can hold" if _NUMBER.fullmatch(word) else "a decimal number"
        _fail(self.n_lines, f"{kind} as word {position} of {self._row_name()}", _quote(word))

    def _row_name(self) -> str:
        """Name the row that comes next."""
        return f"row {self.n_rows % self.n + 1} of {'QKV'[self.n_rows // self.n]}"


def _parse_rows(lines: list[bytes], d: int) -> Float64Array | None:
    """Parse lines of d numbers each, blank ones aside, all at once.

    Returns the numbers in order, or None where some line is not as it should be.
    """
    text = b" " + b"".join(lines) + b"\n"
    if text.translate(None, _NUMBER_OR_SPACE):
        return None
    characters = np.frombuffer(text, np.uint8)
    inside = characters > ord(" ")
    edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
    starts, ends = edges[0::2], edges[1::2]

    words_before = np.searchsorted(starts, np.flatnonzero(characters == ord("\n")))
    words_per_line = np.diff(words_before, prepend=0)
    if not ((words_per_line == d) | (words_per_line == 0)).all():
        return None
    values = _parse_short(text, characters, starts, ends)
    return _parse_words(text.split()) if values is None else values


def _parse_words(words: list[bytes]) -> Float64Array | None:
    """Parse words made of the characters of numbers; None where one is no number, or too large for float64."""
    try:
        values = np.array([*map(float, words)])
    except ValueError:
        return None
    return values if np.isfinite(values).all() else None


def _parse_short(
    text: bytes, characters: npt.NDArray[np.uint8], starts: IndexArray, ends: IndexArray
) -> Float64Array | None:
    """Parse words that all are ``[+-]digits[.digits]`` of at most 15 digits, several times faster than ``float``.

    The words of `text` are ``characters[starts[i]:ends[i]]``. Returns None where one has any other form.
    """
    first = characters[starts]
    negative = first == ord("-")
    signed = negative | (first == ord("+"))
    points = np.flatnonzero(characters == ord("."))
    pointed = np.searchsorted(starts, points, side="right") - 1
    n_digits = ends - starts - signed
    n_digits[pointed] -= 1
    if (
        b"e" in text
        or b"E" in text
        or not ((n_digits > 0) & (n_digits <= _EXACT_DIGITS)).all()
        or not (pointed[1:] > pointed[:-1]).all()  # two points in one word
        or np.count_nonzero(signed) != text.count(b"-") + text.count(b"+")  # a sign inside a word
    ):
        return None
    n_decimals = np.zeros(starts.size, np.intp)
    n_decimals[pointed] = ends[pointed] - points - 1
    integers = np.fromstring(text.translate(None, b".+-"), np.int64, sep=" ")
    values: Float64Array = integers / _POWERS_OF_TEN[n_decimals]
    return np.negative(values, out=values, where=negative)  # after the division, for the sign of -0.0


def _quote(text: bytes) -> str:
    """Return `text` shortened and in quotes, with everything that is not printable escaped."""
    if len(text) > 40:
        return repr(text[:32])[1:] + f"... ({len(text)} bytes)"
    try:
        return repr(text.decode())
    except UnicodeDecodeError:
        return repr(text)[1:]


def _fail(line_number: int, expected: str, got: str) -> NoReturn:
    raise TextProblemError(f"line {line_number}: expected {expected}, got {got}")
