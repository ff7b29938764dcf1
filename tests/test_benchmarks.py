"""The parts of the benchmarks that compute rather than time: work, masks, the check, tables, the README's section."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

# Appended, not prepended: an installed fastattn keeps its precedence over the source tree.
sys.path.append(str(Path(__file__).resolve().parent.parent))
pytest.importorskip("benchmarks", reason="the benchmarks are not part of an installed package")

from benchmarks import accuracy, cache_costs, costs, report, results, tables, threads
from benchmarks.cases import CACHE_CASES, CASES, GROUPS, SCALING_CASES, SERIES, case, make_inputs, visible
from benchmarks.implementations import IMPLEMENTATIONS, Unsupported
from benchmarks.limits import Limit
from benchmarks.record import figures
from benchmarks.reference import largest_error

ALL_CASES = (*CASES, *CACHE_CASES, *SCALING_CASES)
BY_NAME = {item.name: item for item in ALL_CASES}
PLAIN = case("plain", "short", B=2, H=4, K=2, N=7, S=11, D=8, E=5)


def test_names_are_unique_and_groups_known() -> None:
    assert len(BY_NAME) == len(ALL_CASES)
    assert {item.group for item in ALL_CASES} == set(GROUPS)
    assert {item.series for item in SCALING_CASES} == set(SERIES)


@pytest.mark.parametrize("item", [c for c in CASES if not c.boolmask], ids=lambda c: c.name)
def test_flop_counts_visible_pairs(item) -> None:
    small = item.smoke()
    seen = visible(small, make_inputs(small), np.arange(small.n_queries))
    pairs = int(np.broadcast_to(seen, (small.batch, 1, small.n_queries, small.n_keys)).sum())
    assert small.flop == 2 * small.n_heads * pairs * (small.head_dim + small.value_dim)


@pytest.mark.parametrize(
    ("name", "flop", "kv_bytes"),
    [
        ("gpt2_n1024", 2 * 12 * 1024 * 1024 * 128, 12 * 1024 * 128 * 4),
        ("gpt2_n1024_causal", 2 * 12 * (1024 * 1025 // 2) * 128, 12 * 1024 * 128 * 4),
        ("bf16_decode_s16384_gqa4", 2 * 32 * 16384 * 256, 8 * 16384 * 256 * 2),
        ("cache_int8", 2 * 32 * 8192 * 256, 32 * 8192 * (256 + 8)),
        ("boolmask_n1024", 2 * 12 * 1024 * 1024 * 128, 12 * 1024 * 128 * 4),
        ("linear_n_2048", 2 * 2 * (2048 + 2048) * 64 * 64, 2 * 2048 * 128 * 4),
    ],
)
def test_work_of_known_cases(name: str, flop: int, kv_bytes: int) -> None:
    assert (BY_NAME[name].flop, BY_NAME[name].kv_bytes) == (flop, kv_bytes)


def test_visible_is_end_aligned() -> None:
    item = case("window", "mask", H=1, N=2, S=4, D=1, window=1)
    seen = visible(item, make_inputs(item), np.arange(2))
    assert seen[0, 0].astype(int).tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("item", CASES, ids=lambda c: c.name)
def test_smoke_keeps_what_a_case_is_about(item) -> None:
    small = item.smoke()
    assert small.flop <= item.flop
    assert small.n_heads // small.n_kv_heads == item.n_heads // item.n_kv_heads
    assert (small.n_queries == small.n_keys) == (item.n_queries == item.n_keys)
    assert (small.masked, small.square, small.memory_bound) == (item.masked, item.square, item.memory_bound)


NUMPY_CASES = [c for c in ALL_CASES if c.dtype in ("float32", "float64") and not c.page_size]


@pytest.mark.parametrize("item", NUMPY_CASES, ids=lambda c: c.name)
def test_check_accepts_numpy(item) -> None:
    small = item.smoke()
    inputs = make_inputs(small)
    call = IMPLEMENTATIONS["numpy"].prepare(small, inputs, 1)
    assert largest_error(small, inputs, call.result(call.run())) < (1e-13 if item.dtype == "float64" else 1e-5)


@pytest.mark.parametrize("item", CACHE_CASES, ids=lambda c: c.name)
def test_caches_are_filled_with_the_inputs(item) -> None:
    small = item.smoke()
    inputs = make_inputs(small)
    call = IMPLEMENTATIONS["fastattn"].prepare(small, inputs, 1)
    allowed = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "int8": 2e-2}[item.dtype]
    assert largest_error(small, inputs, call.result(call.run())) < allowed


def test_check_rejects_wrong_results() -> None:
    inputs = make_inputs(PLAIN)
    right = IMPLEMENTATIONS["numpy"].prepare(PLAIN, inputs, 1).run()
    assert largest_error(PLAIN, inputs, right + np.float32(1e-2)) == pytest.approx(1e-2, rel=1e-3)
    assert largest_error(PLAIN, inputs, right[:, :, ::-1]) > 0.1
    last = right.copy()
    last[:, :, -1, 0] = np.nan
    assert largest_error(PLAIN, inputs, last) == float("inf")
    with pytest.raises(ValueError, match=r"shape \(2, 4, 7, 5\), got \(2, 7, 4, 5\)"):
        largest_error(PLAIN, inputs, right.swapaxes(1, 2))


def test_numpy_declines_half_types_and_huge_scores() -> None:
    half = BY_NAME["f16_gpt2_n1024"].smoke()
    with pytest.raises(Unsupported, match="float16"):
        IMPLEMENTATIONS["numpy"].prepare(half, make_inputs(half), 1)
    huge = case("huge", "prefill", H=1, N=2**15, D=1)
    with pytest.raises(Unsupported, match=r"score matrix of 4294967296 bytes"):
        IMPLEMENTATIONS["numpy"].prepare(huge, make_inputs(huge), 1)


def test_figures_use_bytes_for_decode_and_operations_elsewhere() -> None:
    decode = figures(BY_NAME["decode_b8_s2048_mha_d64"], 0.5, Limit(4 * 8 * 16 * 2048 * 128 * 4, "read"))
    assert decode["gb_per_second"] == pytest.approx(2 * 8 * 16 * 2048 * 128 * 4 / 1e9)
    assert decode["limit_fraction"] == pytest.approx(0.5)
    prefill = figures(BY_NAME["gpt2_n1024"], 0.5, Limit(4 * BY_NAME["gpt2_n1024"].flop, "product"))
    assert prefill["gb_per_second"] is None
    assert prefill["limit_fraction"] == pytest.approx(0.5)


def test_pinned_environment() -> None:
    pinned = threads.pinned_environment({"PATH": "x", "OPENBLAS_L2_SIZE": "1", "OMP_NUM_THREADS": "9"}, 3)
    assert "OPENBLAS_L2_SIZE" not in pinned
    assert pinned["PATH"] == "x"
    assert {pinned[name] for name in threads.COUNT_VARIABLES} == {"3"}
    with pytest.raises(ValueError, match="at least 1, got 0"):
        threads.pinned_environment({}, 0)


def test_progress_line() -> None:
    line = "benchmarks/test_attention.py::test_attention[gpt2_n1024-ggml] SKIPPED (no [such] thing)   [ 12%]\n"
    match = report.PROGRESS.search(line)
    assert match is not None
    assert match.groupdict() == {"name": "test_attention[gpt2_n1024-ggml]", "outcome": "SKIPPED", "percent": "12"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.994e-6, "9.99 µs"), (9.996e-6, "10.0 µs"), (999.4e-6, "999 µs"), (999.6e-6, "1.00 ms"), (1234.0, "1234 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


def saved(
    path: Path, seconds: dict[str, float], *, thread_count: int = 1, cpu: str = "Some CPU", **missing: str
) -> Path:
    """Write a results file with the case vit_n197 for each implementation in `seconds`."""
    extra = {
        "case": {"name": "vit_n197", "series": "", "position": 0},
        "group": "short",
        "threads": thread_count,
        "smoke": False,
        "max_error": 3e-7,
        "isa": "avx2",
        "cpu": cpu,
        "versions": {"numpy": "2.0"},
        "gb_per_second": None,
        "gflop_per_second": 50.0,
        "limit_fraction": 0.75,
    }
    content = {
        "benchmarks": [{"extra_info": extra | {"implementation": k, "seconds": s}} for k, s in seconds.items()],
        "not_run": [
            {"case": "vit_n197", "implementation": name, "outcome": outcome, "reason": "because"}
            for name, outcome in missing.items()
        ],
        "machine_info": {"system": "Linux", "release": "6", "machine": "x86_64", "cpu": {"count": 2}},
        "commit_info": {"id": "0123456789abcdef", "dirty": True},
        "datetime": "2030-01-02T03:04:05",
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_group_table_keeps_lost_and_failed(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "a.json", {"fastattn": 2e-3, "numpy": 4e-3, "torch": 1e-3}, ggml="skipped", openvino="failed"
    )
    loaded = results.load([path])
    header, _, row = tables.group_table(loaded, "short", 1).splitlines()
    columns = ["case", "fastattn", "numpy", "torch", "openvino", "best peer / fastattn", "fastattn reaches", "of limit"]
    times = ["2.00 ms (3e-07)", "4.00 ms (3e-07)", "1.00 ms (3e-07)", "**failed**"]
    assert header.strip("| ").split(" | ") == columns
    assert row.strip("| ").split(" | ") == ["`vit_n197`", *times, "**0.50 slower**", "50.0 GFLOP/s", "75%"]
    assert tables.not_run_text(loaded).splitlines() == [
        "- failed: because (`vit_n197`)",
        "- skipped: because (`vit_n197`)",
    ]


def test_failed_fastattn_is_shown_without_ratio(tmp_path: Path) -> None:
    loaded = results.load([saved(tmp_path / "a.json", {"numpy": 4e-3}, fastattn="failed")])
    assert loaded.ratio("vit_n197", 1) is None
    assert tables.summary_table(loaded).splitlines()[2] == ("| `vit_n197` | **failed** | numpy 4.00 ms (3e-07) |  |  |")


def test_load_joins_thread_counts_and_lets_later_files_win(tmp_path: Path) -> None:
    old = saved(tmp_path / "a.json", {"fastattn": 2e-3, "numpy": 4e-3})
    new = saved(tmp_path / "b.json", {"fastattn": 1e-3}, numpy="failed")
    two = saved(tmp_path / "c.json", {"fastattn": 5e-4}, thread_count=2)
    loaded = results.load([old, new, two])
    assert loaded.threads == [1, 2]
    assert loaded.results["vit_n197", "fastattn", 1].seconds == 1e-3
    assert ("vit_n197", "numpy", 1) not in loaded.results
    assert loaded.not_run["vit_n197", "numpy", 1].outcome == "failed"
    assert loaded.machine["revision"] == "0123456789ab with local changes"


def test_load_refuses_two_machines_and_nothing(tmp_path: Path) -> None:
    one = saved(tmp_path / "a.json", {"fastattn": 2e-3})
    other = saved(tmp_path / "b.json", {"fastattn": 2e-3}, cpu="Other CPU")
    with pytest.raises(ValueError, match=r"CPU must be the same in all files, got Some CPU, in .* Other CPU"):
        results.load([one, other])
    with pytest.raises(ValueError, match="at least one benchmark, got none"):
        results.load([saved(tmp_path / "c.json", {})])


def test_render_writes_page_pictures_and_readme(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = saved(tmp_path / "a.json", {"fastattn": 2e-3, "numpy": 4e-3})
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{tables.START}\nold\n{tables.END}\nafter\n", encoding="utf-8")
    written = report.render([path], tmp_path / "docs", readme)
    assert all(file.stat().st_size for file in written)
    page = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert "](images/limit-1-thread.svg)" in page
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{tables.START}\n| case |")
    assert text.endswith(f"- date: 2030-01-02\n{tables.END}\nafter\n")
    assert "old" not in text
    assert "| 2.00 |" in text


@pytest.mark.parametrize(
    "text", ["none", tables.START, tables.END + tables.START, tables.START + tables.START + tables.END]
)
def test_replace_section_needs_both_markers_once(text: str) -> None:
    with pytest.raises(ValueError, match="must each occur once"):
        tables.replace_section(text, "new")


def test_accuracy_table_has_every_dtype_and_call() -> None:
    lines = accuracy.table([3, 17]).splitlines()
    assert lines[0].endswith("| S = 3 | S = 17 |")
    rows = [line.split(" | ") for line in lines[2:]]
    expected = {(kind, dtype) for kind in accuracy.QUERIES for dtype in accuracy.DTYPES}
    assert {(row[0].removeprefix("| "), row[1]) for row in rows if row[2] == "fastattn"} == expected
    assert all(float(cell.removesuffix(" |")) < 4 for row in rows for cell in row[3:])


def test_costs_table_has_every_variant() -> None:
    names = [name for name, _ in costs.variants(20)]
    lines = costs.table((20, 33), 0.0).splitlines()
    assert lines[0] == "| | N = 20 | N = 33 |"
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert [row[0] for row in rows] == names[1:]
    assert all(np.isfinite(float(cell)) for row in rows for cell in row[1:])


def test_cache_costs_table_has_every_case_but_the_first() -> None:
    lines = cache_costs.table(0.0, smoke=True).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert len(rows) == len(CACHE_CASES) - 1
    assert rows[0][0] == "float32, pages of 16, over contiguous"
    assert rows[2][0] == "float16, contiguous, over float32"
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


def test_cache_costs_refuse_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cache_costs.TOLERANCE, "int8", 0.0)
    with pytest.raises(ValueError, match="cache_int8 is off by"):
        cache_costs.prepare(next(case for case in CACHE_CASES if case.name == "cache_int8").smoke())


def test_costs_refuse_a_wrong_result() -> None:
    (_, plain), *_ = costs.variants(20)
    costs.check(plain)
    with pytest.raises(ValueError, match="is off by"):
        costs.check(partial(lambda q, k, v: q + v, *plain.args))
