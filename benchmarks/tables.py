"""Markdown from results: tables, the page docs/benchmarks.md, the section of README.md."""

from collections import defaultdict

from benchmarks.cases import GROUPS
from benchmarks.results import OWN, Report, Result

START = "<!-- benchmark-table:start -->"
END = "<!-- benchmark-table:end -->"
LOST = "slower"

INTRODUCTION = """\
# Benchmarks

<!-- Rendered by `python -m benchmarks.report render`; changes by hand are lost. -->

Benchmarks mislead. These are medians on one machine, of the shapes somebody chose, with warm caches and nothing else
running; another processor, another thread count or another shape can turn an order round. So every implementation's
result is checked against float64 before it is timed, the error stands beside the time, cases fastattn loses stay in the
table, and `python -m benchmarks.report run` repeats all of it on your machine.

How to read a cell: time of one call, and in brackets the largest error against float64 on sampled rows. *best peer /
fastattn* above 1 means that fastattn is faster; below 1 the row is marked **slower**. *of limit* is what fastattn
reached of NumPy's own `a @ b` of two 2048 x 2048 matrices (float32 also for half types), or, for decoding, of a plain
read of the same bytes, both measured beside it with the same threads. The softmax is not counted as work.
"""


def duration(seconds: float) -> str:
    """Format a time with three digits.

    >>> duration(1.2345e-6), duration(0.0123), duration(12.345)
    ('1.23 µs', '12.3 ms', '12.3 s')
    """
    for factor, unit in ((1e6, "µs"), (1e3, "ms"), (1.0, "s")):
        value = seconds * factor
        if value < 999.5 or unit == "s":
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    raise AssertionError("the last unit always returns")


def cell(result: Result) -> str:
    """Speed and error, never one without the other."""
    return f"{duration(result.seconds)} ({result.max_error:.0e})"


def rate(result: Result) -> str:
    """GB/s where memory is the bound, GFLOP/s elsewhere."""
    if result.gb_per_second is not None:
        return f"{result.gb_per_second:.1f} GB/s"
    return f"{result.gflop_per_second:.1f} GFLOP/s"


def ratio_text(ratio: float | None) -> str:
    """Mark what is lost.

    >>> ratio_text(1.5), ratio_text(0.8), ratio_text(None)
    ('1.50', '**0.80 slower**', '')
    """
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f} {LOST}**"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Lay out a table, its first column left, the others right.

    >>> print(markdown_table(["case", "time"], [["a", "1 s"]]))
    | case | time |
    |:--|--:|
    | a | 1 s |
    """
    lines = [header, *rows]
    rule = "|:--|" + "--:|" * (len(header) - 1)
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], rule, *text[1:]])


def group_table(report: Report, group: str, threads: int) -> str:
    """One row per case, one column per implementation."""
    names = report.implementations
    header = ["case", *names, "best peer / fastattn", "fastattn reaches", "of limit"]
    rows = []
    for case in report.cases(group):
        own = report.get(case, OWN, threads)
        cells = [_cell_or_outcome(report, case, name, threads) for name in names]
        reached = ["", ""] if own is None else [rate(own), f"{own.limit_fraction:.0%}"]
        rows.append([f"`{case}`", *cells, ratio_text(report.ratio(case, threads)), *reached])
    return markdown_table(header, rows)


def _cell_or_outcome(report: Report, case: str, implementation: str, threads: int) -> str:
    result = report.get(case, implementation, threads)
    if result is not None:
        return cell(result)
    missing = report.not_run.get((case, implementation, threads))
    return "**failed**" if missing is not None and missing.outcome == "failed" else "–"


def summary_table(report: Report) -> str:
    """All cases in one table for the README: fastattn beside the best peer, for each number of threads."""
    header = ["case"]
    for threads in report.threads:
        label = thread_label(threads)
        header += [f"fastattn, {label}", "best peer", "best peer / fastattn", "of limit"]
    rows = []
    for case in report.cases():
        row = [f"`{case}`"]
        for threads in report.threads:
            own, peer = report.get(case, OWN, threads), report.best_peer(case, threads)
            row += [
                _cell_or_outcome(report, case, OWN, threads),
                "–" if peer is None else f"{peer.implementation} {cell(peer)}",
                ratio_text(report.ratio(case, threads)),
                "" if own is None else f"{own.limit_fraction:.0%}",
            ]
        rows.append(row)
    return markdown_table(header, rows)


def thread_label(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def machine_text(report: Report) -> str:
    """Machine, versions and date as a list."""
    lines = [f"- {name}: {value}" for name, value in report.machine.items()]
    if report.smoke:
        lines.insert(0, "- **Smoke run: the shapes are tiny and the figures mean nothing.**")
    return "\n".join(lines)


def not_run_text(report: Report) -> str:
    """Why cells are empty: the cases by outcome and reason."""
    reasons: dict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in report.not_run.values():
        reasons[entry.outcome, entry.reason].add(entry.case)
    lines = []
    for (outcome, reason), cases in sorted(reasons.items()):
        names = ", ".join(f"`{case}`" for case in sorted(cases))
        lines.append(f"- {outcome}: {reason} ({names})")
    return "\n".join(lines)


def page(report: Report, pictures: dict[str, str]) -> str:
    """Write docs/benchmarks.md; `pictures` maps a caption to a path relative to it."""
    parts = [INTRODUCTION]
    parts += [f"![{caption}]({path})\n" for caption, path in pictures.items()]
    for threads in report.threads:
        parts.append(f"## {thread_label(threads).capitalize()}\n")
        for group in report.groups():
            parts += [f"### {group}\n", f"{GROUPS[group].capitalize()}.\n", group_table(report, group, threads) + "\n"]
    parts += ["## Machine, versions, date\n", machine_text(report) + "\n"]
    if report.not_run:
        parts += ["## Not run\n", not_run_text(report) + "\n"]
    return "\n".join(parts)


def readme_section(report: Report) -> str:
    """Return what stands between the markers of README.md."""
    legend = (
        "Time of one call (largest error against float64). Above 1 fastattn is faster than the best of "
        + ", ".join(name for name in report.implementations if name != OWN)
        + f"; rows marked **{LOST}** are lost."
    )
    return "\n\n".join([summary_table(report), legend, machine_text(report)])


def replace_section(text: str, section: str) -> str:
    """Replace what stands between the two markers, which both must occur once, in order.

    >>> replace_section(f"a {START} old {END} b", "new").split()[-2:]
    ['-->', 'b']
    """
    counts = (text.count(START), text.count(END))
    if counts != (1, 1) or text.index(START) > text.index(END):
        raise ValueError(f"{START} and then {END} must each occur once, got {counts[0]} and {counts[1]}")
    before, rest = text.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n{section}\n{END}{after}"
