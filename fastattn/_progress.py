"""Telling the caller how far a long call is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from fastattn._typing import Report

INTERVAL = 0.1  # seconds from one report to the next, here and in the kernels


def check_progress(progress: Any) -> Report | None:
    """The caller's callable, called no more than every `INTERVAL` and never with less than before; None for none."""
    if progress is None:
        return None
    if not callable(progress):
        raise TypeError(f"progress must be callable or None, got {progress!r}")
    due, most = time.monotonic() + INTERVAL, 0.0

    def report(done: float) -> None:
        nonlocal due, most
        if done < 1 and time.monotonic() >= due:  # the end is reported when the result is there
            most = max(most, done)
            progress(most)
            due = time.monotonic() + INTERVAL

    return report


def part_of(report: Report | None, index: int, count: int) -> Report | None:
    """What part `index` of `count` equal parts of a call reports its own fraction to."""
    return None if report is None else lambda done: report((index + done) / count)


def reported(steps: range, report: Report | None) -> Iterable[int]:
    """The steps, each of which is reported when it is done."""
    return steps if report is None else _reporting(steps, report)


def _reporting(steps: range, report: Report) -> Iterator[int]:
    for index, step in enumerate(steps):
        yield step
        report((index + 1) / len(steps))
