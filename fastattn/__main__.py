"""The command line: solve a multi-head attention problem given as text, or describe this installation."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fastattn import multi_head_attention, show_config
from fastattn._text import Problem, TextProblemError, format_rows, parse_problem
from fastattn._version import __version__

_DESCRIPTION = (
    'Solve a multi-head attention problem given as text. The text is a line "n d h", then the n rows of Q, of K and of '
    "V, d numbers each. The columns are split into h heads of d/h features, each head computes softmax(Q K^T / "
    "sqrt(d/h)) V in float64, and the n rows of d numbers of the answer are printed."
)
_EPILOG = (
    "Exit status: 0 when the answer was printed, 2 on any error (one line on standard error says which), "
    "130 when interrupted."
)

_FAILED = 2
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage that argparse puts before it."""
        sys.exit(_fail(f"{message} (see fastattn --help)"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the name of the command; None takes it from ``sys.argv``.

    Returns
    -------
    int
        The exit status: 0 on success and also when the reader of the output went away, 2 on any error,
        130 when interrupted.

    Raises
    ------
    SystemExit
        After ``--help`` and ``--version`` (status 0) and on a wrong command line (status 2).
    """
    if sys.stdout is None:
        return _fail("standard output is closed")
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, where a failure can still be answered
    except BrokenPipeError:
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        return _fail(f"cannot write the output: {error.strerror or error}")
    except KeyboardInterrupt:
        _discard_output()
        return _INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    parser = _Parser(prog="fastattn", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "file",
        nargs="?",
        default="-",
        metavar="FILE",
        help='the problem; "-" or nothing reads standard input; the word "info" describes this installation instead '
        "(write ./info for a file of that name)",
    )
    parser.add_argument("--version", action="version", version=f"fastattn {__version__}")
    file = parser.parse_args(arguments).file
    if file == "info":
        show_config()
        return 0
    return _solve(file)


def _solve(file: str) -> int:
    name = "<stdin>" if file == "-" else file
    try:
        q, k, v, n_heads = _read(file)
        answer = multi_head_attention(q, k, v, n_heads)
    except OSError as error:
        return _fail(f"{name}: cannot read it: {error.strerror or error}")
    except TextProblemError as error:
        return _fail(f"{name}: {error}")
    except RuntimeError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail(f"{name}: not enough memory for a problem of this size")
    sys.stdout.writelines(format_rows(answer))
    return 0


def _read(file: str) -> Problem:
    if file != "-":
        with open(file, "rb") as stream:
            return parse_problem(stream)
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return parse_problem(sys.stdin.buffer)


def _fail(message: str) -> int:
    """Print one line on standard error, whatever characters a file name brought along, and return the exit status."""
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in message)
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # the exit status still tells
            sys.stderr.write(f"fastattn: {line}\n")
    return _FAILED


def _discard_output() -> None:
    """Send what is still buffered for standard output nowhere, or the interpreter would try again when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
