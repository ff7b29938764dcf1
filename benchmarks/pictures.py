"""Pictures from results, drawn with matplotlib."""

from pathlib import Path
from typing import Any

from benchmarks.cases import SERIES
from benchmarks.results import OWN, Report
from benchmarks.tables import thread_label

MARKERS = "osD^vP*X"
OWN_COLOUR = "#c1272d"
SETTINGS = {
    "svg.hashsalt": "fastattn",  # the same results give the same file, so that a commit shows real changes only
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def draw_all(report: Report, folder: Path) -> dict[str, Path]:
    """Draw every picture the results allow into `folder`; return their files by caption."""
    import matplotlib

    matplotlib.use("svg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Path] = {}
    with matplotlib.rc_context(SETTINGS):
        for threads in report.threads:
            label, suffix = thread_label(threads), thread_label(threads).replace(" ", "-")
            if any(report.get(case, name, threads) for case in report.cases() for name in report.implementations):
                path = folder / f"limit-{suffix}.svg"
                _save(_limit_figure(report, threads), path)
                drawn[f"Fraction of the machine's limit, {label}"] = path
            if any(result.series and result.threads == threads for result in report.results.values()):
                path = folder / f"scaling-{suffix}.svg"
                _save(_scaling_figure(report, threads), path)
                drawn[f"Time against one growing dimension, {label}"] = path
    return drawn


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _style(report: Report) -> dict[str, dict[str, Any]]:
    """One colour and marker per implementation, the same in every picture."""
    import matplotlib

    colours = iter(matplotlib.colormaps["tab10"].colors[i] for i in (0, 2, 1, 4, 5, 6, 8, 9, 7))
    return {
        name: {"color": OWN_COLOUR if name == OWN else next(colours), "marker": marker}
        for name, marker in zip(report.implementations, MARKERS, strict=False)
    }


def _limit_figure(report: Report, threads: int) -> Any:
    """Each case a row: a bar for fastattn, a mark for every peer, the limit a line at 1."""
    import matplotlib.pyplot as plt

    cases = report.cases()[::-1]  # the first case at the top
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.28 * len(cases)), layout="constrained")
    for name, style in _style(report).items():
        found = [(row, report.get(case, name, threads)) for row, case in enumerate(cases)]
        points = [(row, result.limit_fraction) for row, result in found if result is not None]
        if not points:
            continue
        rows, fractions = zip(*points, strict=True)
        if name == OWN:
            axes.barh(rows, fractions, color=style["color"], height=0.6, label=name)
        else:
            axes.scatter(fractions, rows, s=28, label=name, edgecolors="white", linewidths=0.5, zorder=3, **style)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(-0.7, len(cases) - 0.3)
    axes.set_xlim(left=0)
    axes.set_xlabel("fraction of the limit: matrix product of NumPy, or for decode a plain read of the same bytes")
    axes.set_title(f"{report.machine['CPU']}, {thread_label(threads)}, {report.machine['date']}")
    labelled = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [name for name in report.implementations if name in labelled]
    figure.legend([labelled[name] for name in order], order, loc="outside lower center", ncols=len(order))
    return figure


def _scaling_figure(report: Report, threads: int) -> Any:
    """One panel per series, both axes logarithmic."""
    import matplotlib.pyplot as plt

    present = {result.series for result in report.results.values() if result.threads == threads}
    shown = {series: label for series, label in SERIES.items() if series in present}
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    size = (4 * columns, 3.2 * rows + 0.5)
    figure, panels = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    styles = _style(report)
    for panel, (series, label) in zip(panels.flat, shown.items(), strict=False):
        for name, style in styles.items():
            points = sorted(
                (result.position, result.seconds)
                for result in report.results.values()
                if (result.series, result.implementation, result.threads) == (series, name, threads)
            )
            if points:
                panel.plot(*zip(*points, strict=True), label=name, markersize=4, linewidth=1.2, **style)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel(label)
        panel.set_ylabel("seconds")
    drawn: dict[str, Any] = {}  # a panel lacks the implementations that cannot do its cases
    for panel in panels.flat:
        handles, labels = panel.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=len(drawn))
    figure.suptitle(f"{report.machine['CPU']}, {thread_label(threads)}, {report.machine['date']}")
    return figure
