"""Long calls stop for a signal or for what `progress` raises, leak nothing, and say how far they are."""

import itertools
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from inputs import normal, output_of, qkv

import fastattn
from fastattn import _linear, _progress, _self_attention, attention

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Calls that would take minutes, on keys and values that are one row, repeated by a stride of 0.
LONG_CALLS = {
    "one long item": "attention(row((1, 1, 64, 64)), row((1, 1, 2**30, 64)), row((1, 1, 2**30, 64)), **o)",
    "many items": "attention(row((1, 64, 2048, 64)), row((1, 64, 2**20, 64)), row((1, 64, 2**20, 64)), **o)",
    "few queries": "attention(row((64, 1, 1, 64)), row((64, 1, 2**30, 64)), row((64, 1, 2**30, 64)), **o)",
    "few queries, divided": "attention(row((1, 1, 8, 8)), row((1, 1, 2**33, 8)), row((1, 1, 2**33, 1)), **o)",
    "float64": "attention(row((1, 1, 64, 64), 'f8'), *[row((1, 1, 2**30, 64), 'f8')] * 2, causal=True, **o)",
    "float16": "attention(row((1, 1, 64, 64), 'f2'), *[row((1, 1, 2**30, 64), 'f2')] * 2, softcap=5.0, **o)",
    "axes apart": "attention(row((2, 3, 1, 64, 64)).swapaxes(0, 1), *[row((3, 2, 1, 2**28, 64))] * 2, **o)",
    "packed": "attention_varlen(row((96, 1, 64)), *[row((2**30, 1, 64))] * 2, [0, 32, 96], [0, 2**20, 2**30], **o)",
    "linear": "linear_attention(row((4, 9, 64)), row((4, 2**31, 64)), row((4, 2**31, 64)))",
    "linear, causal": "linear_attention(row((8, 2**20, 64)), row((8, 2**20, 64)), row((8, 2**20, 64)), causal=True)",
    "self-attention": "mhsa_forward(row((2**17, 1024)), row((1024, 3072)))",
    "self-attention, short": "mhsa_forward(row((3072, 3072)), row((3072, 9216)))",
    "side by side": "multi_head_attention(row((64, 128)), row((2**30, 128)), row((2**30, 128)), 2, **o)",
}
SCRIPT = f"""
import gc, os, pathlib, signal, sys, threading, time
import numpy as np
from fastattn import *

signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored where the tests run
calls = {LONG_CALLS!r}

def row(shape, dtype="f4"):
    return np.broadcast_to(np.ones(shape[-1], dtype), shape)

def function_of(code):  # what eval itself raises, the interpreter would end with
    return eval("lambda o: " + code)

def interrupted(code, **o):
    call = function_of(code)
    sent = []
    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    try:
        call(o)
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    finally:
        timer.join()
    raise AssertionError("nothing was raised")

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 4, 300, 32), np.float32)
want = attention(q, k, v, causal=True)
"""


def run(code, *arguments, timeout=120):
    """What code prints, in a fresh interpreter, after the script."""
    return output_of(SCRIPT + textwrap.dedent(code), *arguments, timeout=timeout)


class Stop(Exception):
    """What a test's progress raises."""


def long_arrays(queries=2048, keys=2**20, heads=64):
    """Arrays of a call that takes minutes; each value row is 0, 1, ..., 63 and therefore each row of the result."""
    q, k = (np.broadcast_to(np.float32(1), (1, heads, rows, 64)) for rows in (queries, keys))
    return q, k, np.broadcast_to(np.arange(64, dtype=np.float32), k.shape)


@posix_only
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", LONG_CALLS)
def test_interrupt(name, threads):
    code = """
    print(interrupted(calls[sys.argv[1]], num_threads=int(sys.argv[2])))
    assert np.array_equal(attention(q, k, v, causal=True), want)
    """
    assert float(run(code, name, threads, timeout=60)) < 10


@linux_only
@pytest.mark.parametrize("threads", [1, 2])
def test_interrupts_leak_nothing(threads):
    code = """
    def resident_kilobytes():
        gc.collect()  # a free-threaded interpreter keeps more garbage, exceptions and all they refer to
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])

    functions = [function_of(code) for code in calls.values() if "**o" in code]  # those with scratch of ours

    def interrupt_many(count):
        for number in range(count):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            try:
                functions[number % len(functions)]({"num_threads": int(sys.argv[1])})
            except KeyboardInterrupt:
                continue
            raise AssertionError("nothing was raised")

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupt_many(50)  # until scratch that is kept, and what malloc keeps, has its size
    before = resident_kilobytes(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    resident = []
    for turn in range(2):  # a free-threaded interpreter takes two megabytes and gives them back, a leak only grows
        interrupt_many(50)
        resident.append(resident_kilobytes())
    after = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    assert after == before[1:]
    assert np.array_equal(attention(q, k, v, causal=True), want)
    print(min(resident) - before[0])
    """
    assert float(run(code, threads)) < 2048


@posix_only
def test_an_interrupt_does_not_stop_the_calls_of_other_threads():
    code = """
    ended, seen = threading.Event(), []
    def progress(done):
        seen.append(done)
        if ended.is_set():
            raise ZeroDivisionError
    def work():
        try:
            function_of(calls["many items"])({"progress": progress})
        except ZeroDivisionError:
            seen.append("stopped")
    thread = threading.Thread(target=work)
    thread.start()
    print(interrupted(calls["one long item"], num_threads=1))
    count = len(seen)
    while len(seen) < count + 2:
        time.sleep(0.01)
    ended.set()
    thread.join()
    assert seen[-1] == "stopped"
    """
    assert float(run(code, timeout=60)) < 10


@pytest.mark.parametrize("threads", [1, 2])
def test_the_interpreter_ends_during_calls_with_progress(threads):
    """Daemon threads are then in calls, or wait for the GIL to report: the process ends quietly."""
    code = """
    started = threading.Barrier(3)
    def work():
        first = []
        def progress(done):
            if not first:
                first.append(started.wait())
        function_of(calls["many items"])({"num_threads": int(sys.argv[1]), "progress": progress})
    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    started.wait()
    end = time.monotonic() + 0.35
    while time.monotonic() < end:  # hold the GIL while they want it
        sum(range(10000))
    """
    assert run(code, threads, timeout=60) == ""


@posix_only
def test_a_handler_that_returns_lets_the_call_go_on():
    code = """
    seen = []
    def handler(number, frame):
        seen.append(attention(q, k, v, causal=True))  # a handler may call, too
        if len(seen) < 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            raise KeyError("enough")
    signal.signal(signal.SIGUSR1, handler)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        attention(row((1, 1, 64, 64)), row((1, 1, 2**30, 64)), row((1, 1, 2**30, 64)), num_threads=2)
    except KeyError as error:
        print(error, len(seen), all(np.array_equal(x, want) for x in seen))
    """
    assert run(code, timeout=60) == "'enough' 3 True"


@pytest.mark.parametrize("threads", [1, 2])
def test_what_progress_raises_stops_the_call(isa, threads):
    """And every row of the result is then either done or untouched."""
    q, k, v = long_arrays(keys=2**14)
    out = np.full(q.shape, np.nan, np.float32)
    seen = []

    def progress(done):
        seen.append(done)
        if done > 0 and len(seen) > 2:
            raise Stop(done)

    with pytest.raises(Stop) as caught:
        attention(q, k, v, out=out, num_threads=threads, progress=progress)
    assert caught.value.args == (seen[-1],)
    assert caught.value.__context__ is None
    done = ~np.isnan(out).any(axis=-1)
    assert done.any()
    assert not done.all()
    assert np.isnan(out[~done]).all()
    assert np.allclose(out[done], np.arange(64))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["attention", "packed", "axes apart", "few queries"])
def test_progress(name, threads):
    """Fractions that never fall, from the calling thread, ten a second at most, and at last 1.0."""
    seen, idents = [], set()

    def progress(done):
        seen.append(done)
        idents.add(threading.get_ident())

    q, k, v = long_arrays(queries=256, keys=2**15, heads=32)
    started = time.monotonic()
    if name == "attention":
        attention(q, k, v, num_threads=threads, progress=progress)
    elif name == "packed":
        q, k, v = (x[0, :2].swapaxes(0, 1) for x in long_arrays(queries=4096, keys=2**15, heads=2))
        bounds = np.arange(0, 4097, 256), np.arange(0, 2**15 + 1, 2**11)
        fastattn.attention_varlen(q, k, v, *bounds, num_threads=threads, progress=progress)
    elif name == "axes apart":
        q, k, v = (np.broadcast_to(x[0, :1], (3, 4, 1, *x.shape[2:])) for x in (q, k, v))
        attention(q, k, v, out=np.empty((4, 3, *q.shape[2:]), np.float32).swapaxes(0, 1), progress=progress)
    else:
        attention(q[:, :, :1], k, v, num_threads=threads, progress=progress)
    assert len(seen) - 1 <= (time.monotonic() - started) / _progress.INTERVAL
    assert seen == sorted(seen)
    assert seen[0] >= 0
    assert seen[-1] == 1.0
    assert seen.count(1.0) == 1
    assert idents == {threading.get_ident()}


def test_progress_of_a_thread_is_called_by_it():
    idents = set()

    def progress(done):
        idents.add(threading.get_ident())
        raise Stop

    def work():
        with pytest.raises(Stop):
            attention(*long_arrays(), num_threads=2, progress=progress)
        idents.add(threading.get_ident())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_progress_may_call():
    q, k, v = qkv(queries=400, keys=400)
    want = attention(q, k, v, num_threads=1)
    inner = []

    def progress(done):
        inner.append(attention(q, k, v, num_threads=2, progress=lambda done: None))
        if len(inner) == 2:
            raise Stop

    with pytest.raises(Stop):
        attention(*long_arrays(), num_threads=2, progress=progress)
    assert all(np.array_equal(x, want) for x in inner)


def test_results_are_the_same_with_progress(isa):
    q, k, v = qkv(queries=300, keys=500)
    assert np.array_equal(attention(q, k, v, progress=lambda done: None), attention(q, k, v))


@pytest.mark.parametrize("queries", [0, 1, 5])
def test_short_calls_report_their_end(queries):
    seen = []
    q, k, v = qkv(queries=queries)
    attention(q, k, v, progress=seen.append)
    assert seen == [1.0]


def test_what_the_last_report_raises():
    """The result is complete by then."""
    q, k, v = qkv()
    out = np.empty(q.shape, np.float32)

    def progress(done):
        raise Stop(done)

    with pytest.raises(Stop, match=r"1\.0"):
        attention(q, k, v, out=out, progress=progress)
    assert np.array_equal(out, attention(q, k, v))


def test_reports_of_parts(monkeypatch):
    """At most one every tenth of a second whatever a call is made of, each in its part's share."""
    now = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    seen = []
    report = _progress.check_progress(seen.append)
    for part in range(4):
        share = _progress.part_of(report, part, 4)
        for tenth in range(10):
            now[0] += 0.03
            share(tenth / 10)
    assert len(seen) == 10
    assert seen == sorted(seen)
    assert seen[0] == 0.075
    assert seen[-1] == (3 + 0.9) / 4


@pytest.mark.parametrize("wrong", [3, "bar", True])
def test_progress_that_cannot_be_called(wrong):
    q, k, v = qkv(heads=2)
    x = normal(2, 8)
    out = np.full(q.shape, 7, np.float32)
    message = f"progress must be callable or None, got {wrong!r}"
    with pytest.raises(TypeError, match=message):
        attention(q, k, v, out=out, progress=wrong)
    assert (out == 7).all()
    with pytest.raises(TypeError, match=message):
        fastattn.attention_varlen(q[0], q[0], q[0], [0, 2], progress=wrong)
    with pytest.raises(TypeError, match=message):
        fastattn.multi_head_attention(x, x, x, 2, progress=wrong)
    with pytest.raises(TypeError, match=message):
        fastattn.linear_attention(x, x, x, progress=wrong)
    with pytest.raises(TypeError, match=message):
        fastattn.mhsa_forward(x, normal(8, 24), progress=wrong)


@pytest.mark.parametrize("name", ["linear", "linear, causal", "self-attention", "self-attention, tiles", "many heads"])
def test_progress_without_softmax(monkeypatch, name):
    """One report after each chunk or tile, on a clock that is a second later whenever somebody looks."""
    clock = itertools.count()
    monkeypatch.setattr(_progress.time, "monotonic", lambda: float(next(clock)))
    x, weights, seen = normal(600, 16), normal(16, 48, seed=1), []
    if name == "linear":
        fastattn.linear_attention(x[:9], normal(5000, 16), normal(5000, 16, seed=1), progress=seen.append)
    elif name == "linear, causal":
        fastattn.linear_attention(x, x, x, causal=True, progress=seen.append)
    elif name == "self-attention":
        monkeypatch.setattr(_self_attention, "SCRATCH_SIZE", 16 * 64)
        fastattn.mhsa_forward(x, weights, progress=seen.append)
    elif name == "self-attention, tiles":
        monkeypatch.setattr(_linear, "LONGEST_PRODUCT", 1 << 20)
        fastattn.mhsa_forward(normal(200, 300), normal(300, 900), progress=seen.append)
    else:
        monkeypatch.setattr(_linear, "SCRATCH_SIZE", 1 << 16)
        fastattn.linear_attention(*(normal(40, 100, 16, seed=seed) for seed in range(3)), progress=seen.append)
    assert len(seen) > 4
    assert seen == sorted(seen)
    assert seen.index(1.0) == len(seen) - 1


@pytest.mark.parametrize("rows", [100, 700])
def test_tiles_of_a_long_product_change_nothing(monkeypatch, rows):
    x, weights = normal(rows, 300), normal(300, 900)
    want = fastattn.mhsa_forward(x, weights)
    monkeypatch.setattr(_linear, "LONGEST_PRODUCT", 1 << 21)
    got = fastattn.mhsa_forward(x, weights)
    assert np.allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
