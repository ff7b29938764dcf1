"""Faults around the process that users reported of other compiled libraries: threads, forks, floating-point state.

The reference behind each test is the public report it re-tells. What depends on a fresh process runs in one.
"""

import os
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from checker import assert_attention_close
from inputs import output_of, run_python

import fastattn
from fastattn import _threads, attention, attention_varlen, set_num_threads

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
forks = pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="fork is not for this system")


def rnd(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(batch, n_heads, n_queries, n_keys, head_dim=16, dtype=np.float32):
    return [rnd(batch, n_heads, n, head_dim, dtype=dtype, seed=n) for n in (n_queries, n_keys, n_keys)]


@pytest.mark.parametrize("level", fastattn.available_isas())
def test_floating_point_state_is_left_alone(level):
    """OpenNMT/CTranslate2#1018, althonos/pyhmmer#71, llvm/llvm-project#57589, zopefoundation/BTrees#179"""
    code = """
        import threading, warnings
        import numpy as np

        def subnormals_live():
            one = np.float32(1)
            assert np.float32(1e-45) * one > 0 and np.array([1e-40], np.float32)[0] * one > 0
            assert np.float64(5e-324) * 1.0 > 0 and np.finfo(np.float32).smallest_subnormal > 0
            assert (np.full(64, 1e-40, np.float32) * one).all()

        def everywhere():
            failed = []
            def run():
                try:
                    subnormals_live()
                except BaseException as error:
                    failed.append(error)
            for _ in range(2):
                thread = threading.Thread(target=run)
                thread.start(); thread.join()
            run()
            assert not failed, failed

        everywhere()
        import fastattn
        everywhere()
        for dtype in (np.float16, np.float32, np.float64):
            for n in (1, 70):
                x = np.ones((2, 4, n, 8), dtype)
                fastattn.attention(x, x, x, causal=True, num_threads=2)
                everywhere()
    """
    assert output_of(code, FASTATTN_ISA=level) == ""


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n_queries", [1, 9, 200])
def test_subnormal_values_survive(n_queries, dtype, isa):
    """OpenNMT/CTranslate2#1018: in every thread that takes part."""
    tiny = np.finfo(dtype).tiny / dtype(64)
    q, k = np.zeros((8, 1, n_queries, 4), dtype), np.zeros((8, 1, 64, 4), dtype)
    v = np.full((8, 1, 64, 4), tiny, dtype)
    for num_threads in (1, 2):
        out = attention(q, k, v, num_threads=num_threads)
        np.testing.assert_allclose(out / tiny, 1, rtol=1e-3)
    np.testing.assert_array_equal(attention(q, k[:, :, :1], v[:, :, :1]), np.broadcast_to(tiny, q.shape))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("n_keys", [*range(1, 10), 1000, 5000])
def test_split_keys_with_empty_parts(n_keys, dtype, isa):
    """pegainfer-project/pegainfer#21, flashinfer-ai/flashinfer#4401: parts without keys or fully masked"""
    q, k, v = qkv(1, 2, 1, n_keys, dtype=dtype)
    j = np.arange(n_keys)
    keeps = [j >= 0, j == 0, j == n_keys - 1, j < 0, j == n_keys // 2, (j == 0) | (j == n_keys - 1), j % 700 == 699]
    for keep in keeps:
        for sinks in (None, [0.5, -1.0]):
            options = {"mask": keep, "sinks": sinks}
            single = attention(q, k, v, num_threads=1, return_lse=True, **options)
            assert_attention_close(single, q, k, v, return_lse=True, **options)
            for num_threads in (2, 8):
                several = attention(q, k, v, num_threads=num_threads, return_lse=True, **options)
                np.testing.assert_array_equal(several[0], single[0])
                np.testing.assert_array_equal(several[1], single[1])


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 33, 33), (3, 5, 65, 65), (1, 2, 1, 5000)], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(shape, isa):
    """pytorch/pytorch#176091, #176179 and #193784; pytorch/executorch#20470: scratch belongs to the piece of work,
    and the count is read once, whatever another thread sets meanwhile."""
    q, k, v = qkv(*shape)
    want, want_lse = attention(q, k, v, causal=True, return_lse=True, num_threads=1)
    assert_attention_close((want, want_lse), q, k, v, causal=True, return_lse=True)
    stop = threading.Event()

    def keep_changing():
        while not stop.is_set():
            for count in (1, 7, 2, 64):
                set_num_threads(count)
            time.sleep(0)

    changing = threading.Thread(target=keep_changing)
    changing.start()
    try:
        for _ in range(50):
            np.testing.assert_array_equal(attention(q, k, v, causal=True), want)
        for num_threads in (2, 3, 5, 8, 64, 10000):
            for _ in range(3):
                out, lse = attention(q, k, v, causal=True, return_lse=True, num_threads=num_threads)
                np.testing.assert_array_equal(out, want)
                np.testing.assert_array_equal(lse, want_lse)
    finally:
        stop.set()
        changing.join()
        set_num_threads(None)


def test_calls_from_several_python_threads(isa):
    """pytorch/pytorch#176091: calls that start at the same moment share nothing."""
    problems = [qkv(2, 4, n, n + 30) for n in (1, 5, 40, 70)]
    wanted = [attention(*arrays, causal=True, num_threads=1) for arrays in problems]
    barrier, wrong = threading.Barrier(4), []

    def run(arrays, want):
        barrier.wait()
        for num_threads in (None, 1, 2, 3) * 5:
            if not np.array_equal(attention(*arrays, causal=True, num_threads=num_threads), want):
                wrong.append(num_threads)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, problems, wanted))
    assert not wrong


@linux
def test_import_starts_nothing():
    """pydata/numexpr#110 and #275, scikit-learn/scikit-learn#34070: no thread, no process, little memory"""
    code = """
        import os, subprocess, sys
        import numpy

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        def never(*arguments, **options):
            raise AssertionError(f"a process is started: {arguments}")

        subprocess.Popen = os.system = os.fork = os.posix_spawn = never
        before, tasks = resident(), len(os.listdir("/proc/self/task"))
        import fastattn
        assert len(os.listdir("/proc/self/task")) == tasks
        assert resident() - before < 10 * 2**20
        assert "multiprocessing" not in sys.modules
    """
    assert output_of(code) == ""


@linux
@pytest.mark.parametrize("variables", [{}, {"FASTATTN_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3"}], ids=str)
def test_threads_are_limited_by_affinity(variables):
    """ollama/ollama#17916, OpenMathLib/OpenBLAS#6059, scikit-learn/scikit-learn#14265"""
    code = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import fastattn
        print(fastattn.get_num_threads())
    """
    assert output_of(code, **{"FASTATTN_NUM_THREADS": None, "OMP_NUM_THREADS": None} | variables) == "1"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, np.inf),
        ({"cpu.max": "rubbish\n"}, np.inf),
    ],
    ids=str,
)
def test_threads_are_limited_by_the_container(files, quota, tmp_path, monkeypatch):
    """ollama/ollama#17916, uxlfoundation/oneTBB#190: the tightest CPU quota of the groups above the process"""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert _threads._quota(tmp_path, own) == quota
    monkeypatch.setattr(_threads, "_affinity", lambda: 64)
    monkeypatch.setattr(_threads, "_quota", lambda: quota)
    for name in ("OMP_NUM_THREADS", "FASTATTN_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert _threads._default() == (64 if quota == np.inf else int(np.ceil(quota)))


@pytest.mark.parametrize("name", ["FASTATTN_NUM_THREADS", "OMP_NUM_THREADS"])
def test_threads_set_in_the_environment(name):
    """pydata/numexpr#299 and #341: legal values limit, others are ignored without a crash."""
    code = """
        import numpy as np, fastattn
        x = np.ones((1, 2, 40, 8), np.float32)
        assert (fastattn.attention(x, x, x) == 1).all()
        print(fastattn.get_num_threads())
    """
    clean = {"FASTATTN_NUM_THREADS": None, "OMP_NUM_THREADS": None}
    default = int(output_of(code, **clean))
    assert int(output_of(code, **clean | {name: "1"})) == 1
    for value in ("", "abc", "-1", "0", "1.5", " ", "99999999999999999999", "²"):
        result = run_python(code, **clean | {name: value})
        assert result.returncode == 0, result.stderr
        assert int(result.stdout.strip()) == default


FORK = """
    import os, signal, sys, threading, time
    import numpy as np, fastattn
    x = np.random.default_rng(0).standard_normal((4, 4, 90, 8)).astype(np.float32)
    want = fastattn.attention(x, x, x, num_threads=2)

    def right():
        return all(np.array_equal(fastattn.attention(x, x, x, num_threads=n), want) for n in (None, 1, 2, 5))

    def child(work):
        "Whether a forked child finishes work within 20 seconds and finds it right."
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if work() else 1)
            finally:
                os._exit(2)
        for _ in range(2000):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status == 0
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return False
"""
FORKS = {
    "child": "assert child(right) and right()",
    "grandchild": "assert child(lambda: right() and child(right)) and right()",
    "siblings": "assert all(child(right) for _ in range(4)) and right()",
    "from a thread": """
        results = []
        thread = threading.Thread(target=lambda: results.append(right() and child(right)))
        thread.start(); thread.join(); assert results == [True] and right()""",
    "during a call": """
        stop = threading.Event()
        def busy():
            while not stop.is_set():
                fastattn.attention(x, x, x, num_threads=2)
        thread = threading.Thread(target=busy); thread.start()
        results = [child(right) for _ in range(5)]
        stop.set(); thread.join(); assert all(results) and right()""",
    "pool": """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(4) as pool:
            outs = pool.starmap_async(fastattn.attention, [(x, x, x)] * 8).get(timeout=20)
        assert all(np.array_equal(out, want) for out in outs) and right()""",
}


@forks
@pytest.mark.parametrize("way", FORKS)
def test_fork_after_first_use(way):
    """scikit-learn/scikit-learn#23823 and #19272, facebookresearch/faiss#5206, dmlc/xgboost#7044,
    lightgbm-org/LightGBM#4751"""
    code = f"{FORK}\n    import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n"
    body = "\n".join("    " + line.removeprefix("        ") for line in FORKS[way].splitlines())
    result = run_python(code + body, timeout=200)
    assert result.returncode == 0, result.stderr


def test_interpreter_exits_after_a_call():
    """facebookresearch/faiss#5206: no live pool, daemon thread or lock keeps the process."""
    code = """
        import threading
        import numpy as np, fastattn
        x = np.ones((4, 4, 300, 16), np.float32)
        threading.Thread(target=lambda: fastattn.attention(x, x, x, num_threads=2)).start()
        print(fastattn.attention(x, x, x, num_threads=2).mean())
    """
    assert output_of(code, timeout=60) == "1.0"


def test_every_integer_type_of_lengths_and_boundaries(isa):
    """ansys/pymapdl#14, Quantco/tabmat#84: index arrays of the platform's own width are not special."""
    q, k, v = qkv(2, 2, 3, 9)
    want = attention(q, k, v, kv_lens=[4, 9], q_offset=[1, 6], causal=True)
    packed = [x.swapaxes(1, 2).reshape(-1, 2, 16) for x in (q, k, v)]
    want_packed = attention_varlen(*packed, [0, 1, 6], [0, 9, 18])
    kinds = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, np.intc, np.int_, np.longlong]
    for kind in kinds:
        options = {name: np.array(value, kind) for name, value in {"kv_lens": [4, 9], "q_offset": [1, 6]}.items()}
        np.testing.assert_array_equal(attention(q, k, v, causal=True, **options), want)
        bounds = np.array([0, 1, 6], kind), np.array([0, 9, 18], kind)
        np.testing.assert_array_equal(attention_varlen(*packed, *bounds), want_packed)
    np.testing.assert_array_equal(attention(q, k, v, kv_lens=(4, 9), q_offset=(1, 6), causal=True), want)
    for wrong in ([4.0, 9.0], np.array([4, 9], np.float64), ["4", "9"], [True, False], 4.0, [None, 4]):
        with pytest.raises(TypeError, match="kv_lens must be integers"):
            attention(q, k, v, kv_lens=wrong)
        with pytest.raises(TypeError, match="q_offset must be integers"):
            attention(q, k, v, q_offset=wrong)


def test_levels_agree():
    """hiddenSymmetries/simsopt#652, zarr-developers/numcodecs#252, pdobsan/pynauty#22: each level can be forced, says
    so, and gives the same numbers but for rounding."""
    code = """
        import numpy as np, fastattn
        x = np.random.default_rng(0).standard_normal((1, 2, 70, 16)).astype(np.float32)
        out = fastattn.attention(x, x[..., ::-1, :], x, causal=True)
        print(fastattn.show_config(mode="dict")["isa_active"], *out[0, 1, ::7, 3].tolist())
    """
    _, *expected = output_of(code, FASTATTN_ISA="baseline").split()
    for level in fastattn.available_isas():
        active, *numbers = output_of(code, FASTATTN_ISA=level).split()
        assert active == level
        np.testing.assert_allclose(np.array(numbers, float), np.array(expected, float), atol=1e-5)


def test_other_threads_run_during_a_call(isa):
    """ERGO-Code/HiGHS#1593: the GIL is released while the kernel works."""
    q, k, v = qkv(1, 8, 1024, 1024, 64, np.float64)
    finished = threading.Event()

    def work():
        for _ in range(3):
            attention(q, k, v, num_threads=1)
        finished.set()

    thread = threading.Thread(target=work)
    thread.start()
    naps = 0
    while not finished.is_set():
        time.sleep(0.001)
        naps += 1
    thread.join()
    assert naps > 8  # holding the GIL would let this thread wake only between the three calls


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_keyboard_interrupt_after_a_call():
    """ERGO-Code/HiGHS#1593: a pending Ctrl-C is raised when the call returns."""
    code = """
        import os, signal, threading
        import numpy as np, fastattn
        signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored where the tests run
        x = np.ones((1, 4, 512, 64), np.float32)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            while True:
                fastattn.attention(x, x, x)
        except KeyboardInterrupt:
            print(fastattn.attention(x, x, x).mean())
    """
    assert output_of(code, timeout=60) == "1.0"


def test_import_keeps_the_gil_off():
    """fonttools/fonttools#4073, sqlalchemy/sqlalchemy#13592: no extension module switches it back on."""
    code = """
        import sys
        before = getattr(sys, "_is_gil_enabled", lambda: True)()
        import fastattn
        assert getattr(sys, "_is_gil_enabled", lambda: True)() == before
    """
    assert output_of(code, PYTHON_GIL=None) == ""


@linux
def test_thread_local_data_is_small():
    """lightgbm-org/LightGBM#6509, dmlc/xgboost#8488, pytorch/pytorch#2575: static TLS is scarce at late import."""
    for path in Path(fastattn.__file__).parent.joinpath("_kernels").glob("*.so"):
        binary = path.read_bytes()
        assert binary[:5] == b"\x7fELF\x02"
        offset = struct.unpack_from("<Q", binary, 32)[0]
        size, count = struct.unpack_from("<HH", binary, 54)
        headers = [struct.unpack_from("<IIQQQQQQ", binary, offset + size * i) for i in range(count)]
        assert sum(header[6] for header in headers if header[0] == 7) < 256  # memory size of PT_TLS segments
