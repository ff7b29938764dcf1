"""How many threads a call may use.

The default is the smallest of what the process may run on (affinity mask), what its control group may spend
(CPU quota, rounded up), ``OMP_NUM_THREADS`` and ``FASTATTN_NUM_THREADS``; values that are not positive integers
are ignored. It is worked out at the first call. A child made by ``os.fork`` runs serially, because the worker
threads of OpenMP do not survive a fork.
"""

from __future__ import annotations

import math
import operator
import os
from typing import SupportsIndex

from fastattn._dispatch import kernel

_chosen: int | None = None
_worked_out: int | None = None
_forked = False
_most = max(64, 2 * (os.cpu_count() or 1))  # threads of a call; more would only cost memory


def _positive(text: str | None) -> int | None:
    """The first number of a setting such as ``"4"`` or ``"4,2"``; None when it is not a positive integer."""
    first = (text or "").split(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and 0 < len(first) < 10 and int(first) > 0 else None


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _quota_of(folder: str) -> float:
    """CPUs that one control group may use: version 2's cpu.max, else version 1's quota and period."""
    words = _read(os.path.join(folder, "cpu.max")).split()
    if not words:
        words = [_read(os.path.join(folder, f"cpu.cfs_{name}_us")).strip() for name in ("quota", "period")]
    try:
        quota, period = int(words[0]), int(words[1])
    except (ValueError, IndexError):
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _quota(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> float:
    """The tightest quota among the process's control groups and their parents."""
    bases = (root, os.path.join(root, "cpu"))
    tightest = min(map(_quota_of, bases))
    for line in _read(own).splitlines():
        _, _, group = line.split(":", 2) if line.count(":") >= 2 else ("", "", "/")
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(1, len(parts) + 1):
            for base in bases:
                tightest = min(tightest, _quota_of(os.path.join(base, *parts[:depth])))
    return tightest


def _default() -> int:
    limits = [_affinity(), _positive(os.environ.get("OMP_NUM_THREADS"))]
    limits.append(_positive(os.environ.get("FASTATTN_NUM_THREADS")))
    quota = _quota()
    if quota != math.inf:
        limits.append(max(1, math.ceil(quota)))
    return min(limit for limit in limits if limit is not None)


def get_num_threads() -> int:
    """The number of threads that a call without ``num_threads`` may use.

    Returns
    -------
    int
        What `set_num_threads` set, else the default: the smallest of the CPUs in the affinity mask, the control
        group's CPU quota (rounded up), ``OMP_NUM_THREADS`` and ``FASTATTN_NUM_THREADS``, and not more than OpenMP's
        own current limit (which threadpoolctl sets). 1 in a forked child and in builds without OpenMP.

    Examples
    --------
    >>> import fastattn
    >>> fastattn.get_num_threads() >= 1
    True
    """
    global _worked_out
    if _forked or not kernel.openmp:
        return 1
    if _chosen is not None:
        return _chosen
    if _worked_out is None:
        _worked_out = _default()
    return min(_worked_out, kernel.max_threads())


def set_num_threads(num_threads: SupportsIndex | None) -> None:
    """Set the number of threads of calls without ``num_threads``, for the whole process.

    Parameters
    ----------
    num_threads : int or None
        At least 1. None goes back to the default, worked out anew.

    Raises
    ------
    TypeError, ValueError
        If it is not an integer, or below 1.

    Examples
    --------
    >>> import fastattn
    >>> fastattn.set_num_threads(1)
    >>> fastattn.get_num_threads()
    1
    >>> fastattn.set_num_threads(None)
    """
    global _chosen, _worked_out
    _chosen, _worked_out = None if num_threads is None else check_num_threads(num_threads), None


def check_num_threads(num_threads: SupportsIndex) -> int:
    """A call's own ``num_threads`` as an int; 1 in a forked child."""
    try:
        count = operator.index(num_threads)
    except TypeError:
        raise TypeError(f"num_threads must be an integer or None, got {num_threads!r}") from None
    if count < 1:
        raise ValueError(f"num_threads must be at least 1, got {count}")
    return min(count, _most)


def threads_of(num_threads: SupportsIndex | None) -> int:
    """What one call uses: its own ``num_threads``, checked, or the default."""
    if num_threads is None:
        return get_num_threads()
    count = check_num_threads(num_threads)
    return 1 if _forked else count


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
