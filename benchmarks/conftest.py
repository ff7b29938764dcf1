"""Options, parameters and the one fixture of the benchmarks. Threads are fixed before NumPy is loaded."""

import sys

from benchmarks import threads as thread_count

thread_count.pin(thread_count.threads_from_arguments(sys.argv[1:]))

# ruff: noqa: E402
import warnings
from collections.abc import Callable, Generator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import record
from benchmarks.cases import CACHE_CASES, CASES, GROUPS, SCALING_CASES, SERIES, TOLERANCE, Case, make_inputs
from benchmarks.implementations import IMPLEMENTATIONS, Call, Unsupported
from benchmarks.limits import Limit, measure_limit
from benchmarks.reference import largest_error

# pytest-benchmark warns about a test that failed before it was timed; the failure itself is the message.
EXPECTED_WARNINGS = ("Benchmark fixture was not used", "Not saving anything")
LIMITS = pytest.StashKey[dict[str, Limit]]()
NOT_RUN = pytest.StashKey[list[dict[str, str]]]()
CASE_NAMES = [case.name for case in (*CASES, *CACHE_CASES, *SCALING_CASES)] + list(SERIES)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastattn benchmarks")
    group.addoption("--threads", type=int, default=1, help="threads of every implementation (default 1)")
    group.addoption("--case", action="append", choices=CASE_NAMES, metavar="NAME", help="only this case or series")
    group.addoption("--group", action="append", choices=list(GROUPS), help="only this group of cases")
    group.addoption("--implementation", action="append", choices=list(IMPLEMENTATIONS), help="only this implementation")
    group.addoption("--smoke", action="store_true", help="tiny shapes and one round: check results, measure nothing")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LIMITS] = {}
    config.stash[NOT_RUN] = []
    for message in EXPECTED_WARNINGS:
        line = f"ignore:{message}:pytest_benchmark.logger.PytestBenchmarkWarning"
        config.addinivalue_line("filterwarnings", line)
        warnings.filterwarnings("ignore", message)  # the second one comes after pytest has dropped its own filters
    wanted = config.getoption("threads")
    found = thread_count.blas_threads()
    timed = config.getoption("benchmark_enable") and not config.getoption("smoke")
    if timed and found not in (None, wanted):
        raise pytest.UsageError(
            f"NumPy's BLAS must use --threads {wanted}, got {found}: NumPy was loaded before the benchmarks, or the "
            "machine has fewer cores. `python -m benchmarks.report run` sets the variables beforehand."
        )


def pytest_report_header(config: pytest.Config) -> str:
    return f"benchmarks: {record.cpu_name()}, threads {config.getoption('threads')}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case of the module with every implementation, the implementations of one case next to each other."""
    option = metafunc.config.getoption
    names, groups = option("case"), option("group")
    cases = [
        case
        for case in metafunc.module.CASES
        if (not groups or case.group in groups) and (not names or case.name in names or case.series in names)
    ]
    metafunc.parametrize("case", cases, ids=lambda case: case.name)
    metafunc.parametrize("implementation", option("implementation") or list(IMPLEMENTATIONS))


@pytest.fixture
def measure(benchmark: Any, request: pytest.FixtureRequest) -> Callable[[Case, str], None]:
    """A function that checks one implementation on one case, then times it."""
    config = request.config
    smoke, threads = config.getoption("smoke"), config.getoption("threads")

    def run(case: Case, implementation: str) -> None:
        used = case.smoke() if smoke else case
        benchmark.group = case.name
        benchmark.params = {"case": case.name, "implementation": implementation}  # what JSON can hold
        inputs = make_inputs(used)
        try:
            call = IMPLEMENTATIONS[implementation].prepare(used, inputs, threads)
        except Unsupported as reason:
            pytest.skip(f"{implementation}: {reason}")
        try:
            error = largest_error(used, inputs, call.result(call.run()))
            if not error <= TOLERANCE[used.dtype]:
                pytest.fail(f"{implementation} is wrong on {case.name} by {error:.1e}, allowed {TOLERANCE[used.dtype]}")
            _time(benchmark, call, smoke=smoke)
        finally:
            call.close()
        if benchmark.stats is None:  # --benchmark-disable: checked, not timed
            return
        limits = config.stash[LIMITS]
        if case.name not in limits:
            limits[case.name] = measure_limit(used, smoke=smoke)
        benchmark.extra_info.update(
            case=asdict(case),
            group=case.group,
            implementation=implementation,
            threads=threads,
            smoke=smoke,
            max_error=error,
            isa=record.isa(),
            cpu=record.cpu_name(),
            versions=record.versions(record.packages_of(IMPLEMENTATIONS)),
            **record.figures(used, benchmark.stats.stats.median, limits[case.name]),
        )

    return run


def _time(benchmark: Any, call: Call, *, smoke: bool) -> None:
    if smoke:
        benchmark.pedantic(call.run, rounds=1, iterations=1)
    else:
        benchmark(call.run)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember what was skipped or failed: a table that silently leaves a row out would mislead."""
    report = yield
    parameters = getattr(item, "callspec", SimpleNamespace(params={})).params
    case = parameters.get("case")  # not a case where the selection left a module empty
    if isinstance(case, Case) and not report.passed:
        item.config.stash[NOT_RUN].append(
            {
                "case": case.name,
                "group": case.group,
                "implementation": parameters["implementation"],
                "outcome": report.outcome,
                "reason": (str(call.excinfo.value).splitlines() or [call.excinfo.typename])[0],
            }
        )
    return report


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    output_json["not_run"] = config.stash[NOT_RUN]
