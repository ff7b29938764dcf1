"""What this installation is: versions, kernels, threads."""

from __future__ import annotations

import platform
from typing import Literal, TypeAlias, overload

import numpy as np

from fastattn._dispatch import available_isas, built_isas, kernel
from fastattn._threads import get_num_threads
from fastattn._version import __version__

Config: TypeAlias = dict[str, str | int | tuple[str, ...]]


@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dict"]) -> Config: ...


def show_config(mode: str = "stdout") -> Config | None:
    """Print, or return, what this installation is.

    Parameters
    ----------
    mode : {"stdout", "dict"}, default "stdout"
        Print lines of ``name: value``, or return them as a dictionary.

    Returns
    -------
    dict or None
        Keys ``fastattn``, ``numpy``, ``python``, ``machine`` (versions and processor), ``isa_built``,
        ``isa_available``, ``isa_active``, ``vector_bits``, ``vector_extension``, ``openmp``, ``num_threads``.

    Raises
    ------
    ValueError
        If mode is neither.

    Examples
    --------
    >>> import fastattn
    >>> config = fastattn.show_config(mode="dict")
    >>> config["isa_active"] in config["isa_available"]
    True
    """
    if mode not in ("stdout", "dict"):
        raise ValueError(f"mode must be 'stdout' or 'dict', got {mode!r}")
    config: Config = {
        "fastattn": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "isa_built": built_isas(),
        "isa_available": available_isas(),
        "isa_active": kernel.isa,
        "vector_bits": kernel.vector_bits,
        "vector_extension": kernel.vector_extension,
        "openmp": kernel.openmp,
        "num_threads": get_num_threads(),
    }
    if mode == "dict":
        return config
    for name, value in config.items():
        print(f"{name}: {', '.join(value) if isinstance(value, tuple) else value}")
    return None
