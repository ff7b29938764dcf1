"""Coverage-guided fuzzing of the Python surface: random calls of all functions, the plain ones against the oracle.

Needs atheris. ``python tests/fuzz/calls.py -max_total_time=300 [CORPUS]`` takes libFuzzer's options.
"""

import sys
from pathlib import Path

import atheris

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
with atheris.instrument_imports(include=["fastattn", "random_calls", "problems"]):
    from random_calls import draw_call, outcome, same, wrong_by

figures = dict.fromkeys(("calls", "refused", "compared", "repeated"), 0)


def one_call(data):
    def choose(items):
        return items[source.ConsumeIntInRange(0, len(items) - 1)]

    source = atheris.FuzzedDataProvider(data)
    call = draw_call(choose)
    result = outcome(call)
    figures["calls"] += 1
    figures["refused"] += isinstance(result, str)
    if call.plain:
        figures["compared"] += 1
        if wrong := wrong_by(call, result):
            raise AssertionError(wrong)
    elif call.legal and "out" not in call.options:
        figures["repeated"] += 1
        if not same(outcome(call), result):
            raise AssertionError(f"{call.name} gives another result the second time")
    if figures["calls"] % 2000 == 0:
        print(figures, flush=True)


atheris.Setup(["calls", "-max_len=256", *sys.argv[1:]], one_call)
atheris.Fuzz()
