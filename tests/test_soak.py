"""Load: a random mix of calls from several processes of several threads each, for minutes; and briefly, always.

``python -m pytest -m soak`` takes two minutes, ``--soak-seconds 3600`` an hour. It prints what it did.
"""

import collections
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from random_calls import draw_call, outcome, same, seeded, wrong_by

import fastattn

PROCESSES, THREADS, SAMPLED = 4, 2, 4


def work(first_seed, seconds, figures):
    """Make calls until the time is over. Every fourth plain one goes to the oracle, every other call is repeated."""
    end, seed = time.monotonic() + seconds, first_seed
    while time.monotonic() < end:
        seed += 1
        call = draw_call(seeded(seed))
        result = outcome(call)
        figures["calls"] += 1
        figures["refused"] += isinstance(result, str)
        if call.plain and seed % SAMPLED == 0:
            figures["oracle"] += 1
            if wrong := wrong_by(call, result):
                figures["mismatches"] += 1
                print(f"seed {seed}: {wrong}", file=sys.stderr)
        elif seed % 2:
            # Drawn anew, as a result given to `out` would be compared with itself.
            figures["repeated"] += 1
            if not same(outcome(draw_call(seeded(seed))), result):
                figures["mismatches"] += 1
                print(f"seed {seed}: {call.name} gives another result the second time", file=sys.stderr)


def soak(process, seconds):
    """One process of the soak: its threads, and the sum of their figures as JSON on standard output."""
    names = ("calls", "refused", "oracle", "repeated", "mismatches", "died")
    figures = [collections.Counter(dict.fromkeys(names, 0)) for _ in range(THREADS)]

    def guarded(thread):
        figures[thread]["died"] = 1
        work((process * THREADS + thread) << 32, seconds, figures[thread])
        figures[thread]["died"] = 0

    threads = [threading.Thread(target=guarded, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for count in range(1, 1 << 30):
        fastattn.set_num_threads(1 + count % 3)
        threads[0].join(0.05)
        if not threads[0].is_alive():
            break
    for thread in threads:
        thread.join()
    total = collections.Counter()
    for figure in figures:
        total.update(figure)
    print(json.dumps(total))


def run(seconds):
    """The figures of all processes."""
    environment = os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parents[1])}
    command = [sys.executable, "-W", "error", __file__]
    started = [
        subprocess.Popen([*command, str(n), str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         text=True, env=environment)
        for n in range(PROCESSES)
    ]  # fmt: skip
    total = collections.Counter()
    for process in started:
        out, err = process.communicate(timeout=seconds + 300)
        assert (process.returncode, err) == (0, ""), err
        total.update(json.loads(out))
    return total


def check(seconds, capsys):
    figures = run(seconds)
    with capsys.disabled():
        print(f"\nsoak, {seconds} s, {PROCESSES} processes x {THREADS} threads:", dict(figures))
    assert figures["mismatches"] == figures["died"] == 0
    assert figures["oracle"] > 0
    assert figures["refused"] > 0
    assert figures["repeated"] > 0


@pytest.mark.soak
def test_soak(request, capsys):
    check(request.config.getoption("--soak-seconds"), capsys)


def test_a_few_seconds_of_it(capsys):
    check(5, capsys)


if __name__ == "__main__":
    soak(int(sys.argv[1]), float(sys.argv[2]))
