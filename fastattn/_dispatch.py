"""Which compiled kernel serves this process: decided once, at import.

The detector runs first; only then is one kernel module imported, because importing a module already executes
instructions of the level it was compiled for. Nothing else imports kernel modules.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import TYPE_CHECKING

LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16")
"""Instruction-set levels, lowest first."""


def _supported() -> tuple[str, ...]:
    try:
        from fastattn._kernels.cpu import supported_levels
    except ImportError as error:
        raise ImportError(
            "fastattn's compiled kernels are not built here: run `pip install .` in the source tree "
            "(or `pip install -e .` to build them in place)"
        ) from error
    return supported_levels()


def built_isas() -> tuple[str, ...]:
    """The levels this installation has kernels for, lowest first."""
    return tuple(name for name in LEVELS if importlib.util.find_spec(f"fastattn._kernels.{name}") is not None)


def available_isas() -> tuple[str, ...]:
    """The instruction-set levels that are built here and that this machine runs.

    Returns
    -------
    tuple of str
        Lowest first, of ``"baseline"``, ``"avx2"`` (x86-64-v3), ``"avx512"`` (x86-64-v4) and ``"avx512_bf16"``
        (that and AVX512_BF16). On AArch64 the baseline is NEON.

    Examples
    --------
    >>> import fastattn
    >>> fastattn.available_isas()[0]
    'baseline'
    """
    supported = _supported()
    return tuple(name for name in built_isas() if name in supported)


def load(name: str) -> ModuleType:
    """The kernel module of one available level.

    Raises
    ------
    RuntimeError
        If the level is not built, or this machine does not run it.
    """
    if name not in available_isas():
        raise RuntimeError(
            f"FASTATTN_ISA={name!r} cannot be used: built are {', '.join(built_isas()) or 'none'}; "
            f"this machine runs {', '.join(_supported())}"
        )
    return importlib.import_module(f"fastattn._kernels.{name}")


def _choose() -> ModuleType:
    forced = os.environ.get("FASTATTN_ISA", "")
    if forced:
        return load(forced)
    available = available_isas()
    if not available:
        raise RuntimeError(
            f"no kernel of fastattn runs on this machine: built are {', '.join(built_isas()) or 'none'}; "
            f"this machine runs {', '.join(_supported())}"
        )
    return load(available[-1])


if TYPE_CHECKING:
    from fastattn._kernels import baseline

    kernel = baseline  # all kernel modules have its types
else:
    kernel = _choose()
    """The kernel module in use."""
