"""What is stored beside each timing: rates, fraction of the limit, error, and what they were measured with."""

import importlib.metadata
import platform
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.cases import Case
from benchmarks.limits import Limit


def figures(case: Case, seconds: float, limit: Limit) -> dict[str, Any]:
    """Turn the time of one call into GFLOP/s, GB/s where memory is the bound, and the fraction of the limit reached."""
    bytes_rate = case.kv_bytes / seconds
    rate = bytes_rate if case.memory_bound else case.flop / seconds
    return {
        "seconds": seconds,
        "gflop_per_second": case.flop / seconds / 1e9,
        "gb_per_second": bytes_rate / 1e9 if case.memory_bound else None,
        "limit": asdict(limit),
        "limit_fraction": rate / limit.rate,
    }


@cache
def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the version of Python, of NumPy's BLAS and of each package that is installed."""
    import threadpoolctl

    import fastattn

    found = {"python": platform.python_version()}
    for pool in threadpoolctl.threadpool_info():
        if pool["user_api"] == "blas":
            found[pool["internal_api"]] = str(pool["version"])
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"fastattn": fastattn.__version__}


@cache
def isa() -> str:
    """Return the instruction set the installed fastattn runs on, as it reports it."""
    import fastattn

    show_config = getattr(fastattn, "show_config", None)
    return str(show_config(mode="dict").get("isa_active", "unknown")) if show_config else "unknown"


@cache
def cpu_name() -> str:
    """Return the processor's own name."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return platform.processor() or platform.machine()


def packages_of(modules: dict[str, ModuleType]) -> tuple[str, ...]:
    """Return the distributions behind the implementations, each once."""
    return tuple(dict.fromkeys(module.PACKAGE for module in modules.values()))
