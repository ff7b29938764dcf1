"""Thread counts, forks, many Python threads at once, the GIL, and leaving the interpreter."""

import math
import os
import sys
import threading
import time

import numpy as np
import pytest
from inputs import normal, output_of, qkv

import fastattn
from fastattn import _dispatch, _threads, attention

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
needs_openmp = pytest.mark.skipif(not _dispatch.kernel.openmp, reason="built without OpenMP")


@pytest.fixture
def restored():
    yield
    fastattn.set_num_threads(None)


@pytest.fixture
def machine(monkeypatch):
    """A machine of 8 CPUs without a quota or settings."""
    monkeypatch.setattr(_threads, "_affinity", lambda: 8)
    monkeypatch.setattr(_threads, "_quota", lambda: math.inf)
    for name in ("OMP_NUM_THREADS", "FASTATTN_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_set_and_get(restored):
    default = fastattn.get_num_threads()
    assert default >= 1
    fastattn.set_num_threads(1)
    assert fastattn.get_num_threads() == 1
    fastattn.set_num_threads(np.int64(1))
    assert fastattn.get_num_threads() == 1
    fastattn.set_num_threads(None)
    assert fastattn.get_num_threads() == default


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "FASTATTN_NUM_THREADS"])
@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("1", 1), ("3", 3), (" 5 ", 5), ("100", 8), ("4,2", 4),
        ("", 8), ("0", 8), ("abc", 8), ("-1", 8), ("2.5", 8), ("0x2", 8), ("²", 8), ("9" * 40, 8), (",3", 8),
    ],
)  # fmt: skip
def test_environment(machine, name, value, count):
    machine.setenv(name, value)
    assert _threads._default() == count


def test_the_smallest_limit_counts(machine):
    machine.setenv("OMP_NUM_THREADS", "6")
    machine.setenv("FASTATTN_NUM_THREADS", "5")
    assert _threads._default() == 5
    machine.setattr(_threads, "_affinity", lambda: 4)
    assert _threads._default() == 4
    for quota, count in ((2.5, 3), (2.0, 2), (0.1, 1)):
        machine.setattr(_threads, "_quota", lambda quota=quota: quota)
        assert _threads._default() == count


@pytest.mark.parametrize("value", ["", "0", "abc", "-1", "1"])
def test_environment_of_a_fresh_process(value):
    code = "import fastattn; print(fastattn.get_num_threads())"
    count = int(output_of(code, OMP_NUM_THREADS=value, FASTATTN_NUM_THREADS=value))
    assert count == 1 if value == "1" else count >= 1


@linux_only
def test_affinity():
    code = """
    import os
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import fastattn
    print(fastattn.get_num_threads())
    """
    assert output_of(code) == "1"


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("150000 100000\n", 1.5), ("max 100000\n", math.inf), ("50000 100000", 0.5), ("", math.inf),
        ("nonsense\n", math.inf), ("-1 100000\n", math.inf), ("100000 0\n", math.inf), ("100000\n", math.inf),
    ],
)  # fmt: skip
def test_quota_of_version_2(tmp_path, text, quota):
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    write(tmp_path / "cg" / "a" / "b", cpu__max=text)
    assert _threads._quota(tmp_path / "cg", own) == quota


def test_quota_of_a_parent(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/a/b/c\n")
    root = tmp_path / "cg"
    write(root / "a" / "b" / "c", cpu__max="max 100000\n")
    write(root / "a", cpu__max="400000 100000\n")
    assert _threads._quota(root, own) == 4
    write(root / "a" / "b", cpu__max="300000 100000\n")
    assert _threads._quota(root, own) == 3
    write(root, cpu__max="200000 100000\n")  # what a container sees of its own group
    assert _threads._quota(root, own) == 2


@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [("150000\n", "100000\n", 1.5), ("-1\n", "100000\n", math.inf), ("100000\n", "", math.inf)],
)
@pytest.mark.parametrize("place", ["cpu", "cpu/docker/x"])
def test_quota_of_version_1(tmp_path, place, quota, period, expected):
    own = tmp_path / "own"
    own.write_text("12:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n")
    write(tmp_path / "cg" / place, cpu__cfs_quota_us=quota, cpu__cfs_period_us=period)
    assert _threads._quota(tmp_path / "cg", own) == expected


@pytest.mark.parametrize("text", ["", "0::/\n", "garbage\n", "0::/../../outside\n", "::\n", "a:b\n\n"])
def test_no_quota(tmp_path, text):
    own = tmp_path / "own"
    own.write_text(text)
    write(tmp_path / "outside", cpu__max="100000 100000\n")
    assert _threads._quota(tmp_path / "cg" / "cg", own) == math.inf
    assert _threads._quota(tmp_path / "cg" / "cg", tmp_path / "missing") == math.inf


FORK = """
import os, sys, threading, warnings
import numpy as np
import fastattn

warnings.simplefilter("ignore", DeprecationWarning)  # about fork beside threads: the very subject
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 4, 200, 64)).astype(np.float32) for _ in range(3))

def attend():
    return fastattn.attention(q, k, v, causal=True)

expected = fastattn.attention(q, k, v, causal=True, num_threads=1)  # starts no thread

def right(_=None):
    explicit = fastattn.attention(q, k, v, causal=True, num_threads=4)
    return np.array_equal(attend(), expected) and np.array_equal(explicit, expected)

def in_child(function):
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
FORKS = {
    "child": "assert right() and in_child(right)",
    "grandchild": "assert right() and in_child(lambda: right() and in_child(right))",
    "child that is the first to use threads": "assert in_child(right) and right()",
    "pool": """
assert right()
import multiprocessing
with multiprocessing.get_context("fork").Pool(4) as pool:
    assert all(pool.map(right, range(8)))
""",
    "from another thread": """
results = []
thread = threading.Thread(target=lambda: results.append(right() and in_child(right)))
thread.start()
thread.join()
assert results == [True]
""",
    "while another thread is inside a call": """
stop = threading.Event()
def loop():
    while not stop.is_set():
        attend()
thread = threading.Thread(target=loop)
thread.start()
try:
    assert all(in_child(right) for _ in range(5))
finally:
    stop.set()
    thread.join()
""",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("case", FORKS)
def test_fork(case):
    output_of(FORK + FORKS[case])


def test_many_python_threads_at_once(restored):
    sizes = [(1, 1, 1, 1, 3000), (2, 4, 2, 60, 90), (1, 8, 1, 1, 500), (1, 2, 2, 300, 300)]
    cases = [qkv(*size, 16, dtypes=dtypes) for size in sizes for dtypes in ("float32", "float64")]
    expected = [attention(*case, causal=True, num_threads=1) for case in cases]
    barrier, stop = threading.Barrier(len(cases) + 1), threading.Event()
    wrong = []

    def work(index):
        barrier.wait()
        for turn in range(8):
            case = (index + turn) % len(cases)
            options = {} if turn % 2 else {"num_threads": 2 + turn}
            if not np.array_equal(attention(*cases[case], causal=True, **options), expected[case]):
                wrong.append((index, case))

    def change_num_threads():
        barrier.wait()
        count = 0
        while not stop.is_set():
            count += 1
            fastattn.set_num_threads(1 + count % 7)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    changer = threading.Thread(target=change_num_threads)
    for thread in (*workers, changer):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    changer.join()
    assert not wrong


def test_other_threads_run_during_a_call():
    """Another Python thread can watch the result while it is being written: the GIL is not held."""
    q, k, v = qkv(1, 8, 8, 3000, 3000, 64)
    seen_half_done = False
    end = time.monotonic() + 30  # on a busy machine one call may be too short to be watched
    while not seen_half_done and time.monotonic() < end:
        out = np.full(q.shape, np.nan, np.float32)
        call = threading.Thread(target=attention, args=(q, k, v), kwargs={"out": out, "num_threads": 1})
        call.start()
        while call.is_alive() and not seen_half_done:
            written = ~np.isnan(out[0, :, 0, 0])
            seen_half_done = bool(written.any() and not written.all())
        call.join()
    assert seen_half_done


def test_the_interpreter_exits():
    """At once after a call, and while a daemon thread is still in one."""
    code = """
    import threading
    import numpy as np, fastattn
    x = np.ones((1, 8, 800, 64), np.float32)
    fastattn.attention(x, x, x, num_threads=2)
    def loop():
        while True:
            fastattn.attention(x, x, x, num_threads=2)
    if {daemon}:
        threading.Thread(target=loop, daemon=True).start()
    """
    for daemon in (False, True):
        output_of(code.replace("{daemon}", str(daemon)), timeout=60)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_an_interrupt_during_a_call_is_raised_after_it():
    code = """
    import os, signal, threading
    import numpy as np, fastattn
    signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored where the tests run
    x = np.ones((1, 8, 1000, 64), np.float32)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        while True:
            out = fastattn.attention(x, x, x)
    except KeyboardInterrupt:
        assert np.allclose(fastattn.attention(x, x, x), 1)
        print("interrupted")
    """
    assert output_of(code, timeout=60) == "interrupted"


@needs_openmp
def test_threadpoolctl_sees_and_limits_it():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    fastattn.attention(*(normal(1, 1, 2, 4) for _ in range(3)))
    assert "openmp" in {pool["user_api"] for pool in threadpoolctl.threadpool_info()}
    before = fastattn.get_num_threads()
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        assert fastattn.get_num_threads() == 1
    assert fastattn.get_num_threads() == before


@linux_only
@needs_openmp
def test_worker_threads_start_with_the_first_call_worth_them_and_no_sooner():
    code = """
    import os, time
    import numpy as np
    count = lambda: len(os.listdir("/proc/self/task"))
    before = count()
    import fastattn
    x = np.ones((1, 1, 8, 8), np.float32)
    fastattn.attention(x, x, x, num_threads=4)
    assert count() == before, "a small call is done by its own thread"
    x = np.ones((1, 8, 32, 32), np.float32)  # some 15 microseconds
    for _ in range(3):
        time.sleep(0.02)
        fastattn.attention(x, x, x, num_threads=2)
    assert count() == before, "so is a short one that follows no other closely"
    for _ in range(1000):
        fastattn.attention(x, x, x, num_threads=2)
    assert count() == before + 1, "one after another they are divided"
    x = np.ones((1, 4, 400, 64), np.float32)
    before = count()
    fastattn.attention(x, x, x, num_threads=1)
    assert count() == before, "one thread means one thread"
    fastattn.attention(x, x, x, num_threads=3)
    assert count() == before + 1, count()
    """
    output_of(code)
