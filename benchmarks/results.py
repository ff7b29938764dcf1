"""Saved benchmark runs, read back."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import CACHE_CASES, CASES, GROUPS
from benchmarks.implementations import IMPLEMENTATIONS

OWN = "fastattn"
SAME_IN_ALL_FILES = ("CPU", "fastattn runs on", "versions")


@dataclass(frozen=True)
class Result:
    """One implementation on one case with one number of threads."""

    case: str
    group: str
    implementation: str
    threads: int
    seconds: float
    max_error: float
    gflop_per_second: float
    gb_per_second: float | None
    limit_fraction: float
    series: str = ""
    position: int = 0


@dataclass(frozen=True)
class NotRun:
    """A case an implementation did not finish: `outcome` is "skipped" or "failed"."""

    case: str
    implementation: str
    threads: int
    outcome: str
    reason: str


@dataclass(frozen=True)
class Report:
    """All results of one machine, keyed by (case, implementation, threads), with what they were measured with."""

    results: dict[tuple[str, str, int], Result]
    not_run: dict[tuple[str, str, int], NotRun]
    machine: dict[str, str]
    smoke: bool

    @property
    def threads(self) -> list[int]:
        return sorted({threads for _, _, threads in self.results})

    @property
    def implementations(self) -> list[str]:
        """Those with a result or a failure, fastattn first; one that was only ever skipped is left out."""
        present = {implementation for _, implementation, _ in self.results}
        present |= {entry.implementation for entry in self.not_run.values() if entry.outcome == "failed"}
        return [name for name in IMPLEMENTATIONS if name in present]

    def cases(self, group: str | None = None) -> list[str]:
        """Names of a group's cases that have a result or a reason for none, in the order of the table.

        Without a group: those of the summary, which leaves out the caches.
        """
        known = {case for case, _, _ in (*self.results, *self.not_run)}
        cases = CASES if group is None else (*CASES, *CACHE_CASES)
        return [case.name for case in cases if case.name in known and group in (None, case.group)]

    def groups(self) -> list[str]:
        return [group for group in GROUPS if self.cases(group)]

    def get(self, case: str, implementation: str, threads: int) -> Result | None:
        return self.results.get((case, implementation, threads))

    def best_peer(self, case: str, threads: int) -> Result | None:
        """Return the fastest result that is not ours."""
        found = [self.get(case, name, threads) for name in self.implementations if name != OWN]
        return min((result for result in found if result is not None), key=lambda result: result.seconds, default=None)

    def ratio(self, case: str, threads: int) -> float | None:
        """Return time of the best peer over ours: above 1 fastattn is the faster."""
        own, peer = self.get(case, OWN, threads), self.best_peer(case, threads)
        return None if own is None or peer is None else peer.seconds / own.seconds


def load(paths: Iterable[Path]) -> Report:
    """Read pytest-benchmark's JSON files. A later file replaces an earlier result of the same case and threads."""
    results: dict[tuple[str, str, int], Result] = {}
    not_run: dict[tuple[str, str, int], NotRun] = {}
    machine: dict[str, str] = {}
    smoke = False
    for path in paths:
        saved = json.loads(path.read_text(encoding="utf-8"))
        described = _machine(saved)
        for name in SAME_IN_ALL_FILES:
            if machine.get(name, described[name]) != described[name]:
                raise ValueError(
                    f"{name} must be the same in all files, got {machine[name]}, in {path} {described[name]}"
                )
        machine = described
        for benchmark in saved["benchmarks"]:
            result = _result(benchmark["extra_info"])
            key = (result.case, result.implementation, result.threads)
            results[key] = result
            not_run.pop(key, None)
            smoke |= benchmark["extra_info"]["smoke"]
        threads = saved["benchmarks"][0]["extra_info"]["threads"]
        for missing in saved["not_run"]:
            entry = NotRun(missing["case"], missing["implementation"], threads, missing["outcome"], missing["reason"])
            key = (entry.case, entry.implementation, threads)
            not_run[key] = entry
            results.pop(key, None)
    if not results:
        raise ValueError("no benchmark results in the files given")
    return Report(results, not_run, machine, smoke)


def _result(extra: dict[str, Any]) -> Result:
    return Result(
        case=extra["case"]["name"],
        group=extra["group"],
        implementation=extra["implementation"],
        threads=extra["threads"],
        seconds=extra["seconds"],
        max_error=extra["max_error"],
        gflop_per_second=extra["gflop_per_second"],
        gb_per_second=extra["gb_per_second"],
        limit_fraction=extra["limit_fraction"],
        series=extra["case"]["series"],
        position=extra["case"]["position"],
    )


def _machine(saved: dict[str, Any]) -> dict[str, str]:
    """Pick what a reader needs to judge the figures."""
    if not saved["benchmarks"]:
        raise ValueError("a results file must hold at least one benchmark, got none")
    extra, info, commit = saved["benchmarks"][0]["extra_info"], saved["machine_info"], saved["commit_info"]
    revision = (commit.get("id") or "unknown")[:12] + (" with local changes" if commit.get("dirty") else "")
    return {
        "CPU": extra["cpu"],
        "cores": str(info.get("cpu", {}).get("count", "unknown")),
        "fastattn runs on": extra["isa"],
        "system": f"{info['system']} {info['release']}, {info['machine']}",
        "versions": ", ".join(f"{name} {version}" for name, version in extra["versions"].items()),
        "revision": revision,
        "date": saved["datetime"][:10],
    }
