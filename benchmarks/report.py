"""Run the benchmarks and render what they saved.

python -m benchmarks.report run --threads 1 2 --output results/ [arguments for pytest]
python -m benchmarks.report render results/*.json [--docs docs] [--readme README.md]
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results, tables
from benchmarks.threads import pinned_environment

ROOT = Path(__file__).resolve().parent.parent
# `benchmarks/test_attention.py::test_attention[gpt2_n1024-torch] PASSED   [ 12%]`
PROGRESS = re.compile(r"::(?P<name>\S+)\s+(?P<outcome>[A-Z]+)\b.*\[\s*(?P<percent>\d+)%\]\s*$")


def run(thread_counts: Sequence[int], output: Path, pytest_arguments: Sequence[str]) -> int:
    """Benchmark once per thread count, each in a process of its own; return 0 if nothing failed."""
    output.mkdir(parents=True, exist_ok=True)
    failed = 0
    for threads in thread_counts:
        path = (output / f"benchmark-threads-{threads}.json").resolve()
        command = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-enable", "-v", "-p", "no:cacheprovider"]
        command += ["--threads", str(threads), f"--benchmark-json={path}", *pytest_arguments]
        failed |= _watch(command, threads)
    return int(failed != 0)


def _watch(command: Sequence[str], threads: int) -> int:
    """Run pytest behind a progress bar; print its failures, or everything if it never started."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[case]}", markup=False),
    )
    environment = pinned_environment(os.environ, threads) | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    console = Console()
    lines = []
    with (
        Progress(*columns, console=console) as progress,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        task = progress.add_task(tables.thread_label(threads), total=100, case="collecting")
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            match = PROGRESS.search(line)
            if match:
                progress.update(task, completed=int(match["percent"]), case=match["name"])
                if match["outcome"] in ("FAILED", "ERROR"):
                    progress.console.print(line.rstrip(), markup=False)
    if process.returncode:
        console.print("".join(lines), markup=False, highlight=False)
    return process.returncode


def render(paths: Sequence[Path], docs: Path, readme: Path | None) -> list[Path]:
    """Write docs/benchmarks.md with its pictures, and the README's section if asked; return the files written."""
    from benchmarks.pictures import draw_all

    report = results.load(paths)
    docs.mkdir(parents=True, exist_ok=True)
    pictures = draw_all(report, docs / "images")
    page = docs / "benchmarks.md"
    links = {caption: path.relative_to(docs).as_posix() for caption, path in pictures.items()}
    page.write_text(tables.page(report, links), encoding="utf-8")
    written = [page, *pictures.values()]
    if readme is not None:
        text = readme.read_text(encoding="utf-8")
        readme.write_text(tables.replace_section(text, tables.readme_section(report)), encoding="utf-8")
        written.append(readme)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="benchmark, one JSON file per thread count", allow_abbrev=False)
    runner.add_argument("--threads", type=int, nargs="+", default=[1], help="thread counts (default 1)")
    runner.add_argument("--output", type=Path, default=Path("results"), help="folder of the JSON files")
    renderer = commands.add_parser("render", help="write tables and pictures from JSON files")
    renderer.add_argument("files", type=Path, nargs="+")
    renderer.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of benchmarks.md and images/")
    renderer.add_argument("--readme", type=Path, help="file whose section between the markers is replaced")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "run":
        return run(options.threads, options.output, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    for path in render(options.files, options.docs, options.readme):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
