"""Random calls of the public functions, right ones and wrong ones, and what must come of them.

All randomness is one function `choose`, which picks an item of a sequence: a seeded generator in the suite
(`seeded`), the bytes of a fuzzer in tests/fuzz. The same choices always make the same call.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from inputs import DTYPES
from problems import OPTIONS, draw_problem

import fastattn
from fastattn import reference

Choose = Callable[[Sequence[Any]], Any]

ROWS = [1, 2, 3, 5, 8, 9, 17, 33, 70]
KEYS = [0, 1, 2, 7, 16, 33, 65, 130, 257, 600]
DIMS = [1, 2, 3, 8, 16, 19, 31, 64]
SEEDS = range(1 << 16)

# What a faulty or hostile call may raise. Anything else is a bug.
ALLOWED_ERRORS = (TypeError, ValueError, MemoryError)


class Call(NamedTuple):
    """One call of a public function; `legal` if nothing about it is wrong, `plain` if its numbers are ordinary."""

    name: str
    arguments: list[Any]
    options: dict[str, Any]
    legal: bool
    plain: bool

    def __call__(self) -> Any:
        return getattr(fastattn, self.name)(*self.arguments, **self.options)


def seeded(seed: int) -> Choose:
    random = np.random.default_rng(seed)
    return lambda items: items[int(random.integers(len(items)))]


def _normal(choose: Choose, *shape: int, dtype: Any) -> np.ndarray:
    return np.random.default_rng(choose(SEEDS)).standard_normal(shape).astype(dtype)


def _attention(choose: Choose) -> tuple[list[Any], dict[str, Any]]:
    names = {name for name in OPTIONS if choose((False, False, True))}
    lead = choose([(), (1,), (2,), (3, 2), (0,)])
    *arguments, options = draw_problem(
        names,
        choose(list(DTYPES)),
        seed=choose(SEEDS),
        lead=lead,
        n_kv_heads=choose([1, 1, 2, 3]),
        group=choose([1, 1, 2, 5]),
        n_queries=choose(ROWS),
        n_keys=choose(KEYS),
        head_dim=choose(DIMS),
        value_dim=choose(DIMS),
    )
    return arguments, options


def _packed(choose: Choose) -> tuple[list[Any], dict[str, Any]]:
    q_dtype, kv_dtype = DTYPES[choose(list(DTYPES))]
    kv_heads, group, dim = choose([1, 2]), choose([1, 3]), choose(DIMS)
    n_members = choose([0, 1, 2, 5])
    bounds = [np.cumsum([0] + [choose([0, 1, 3, 20, 90]) for _ in range(n_members)]) for _ in "qk"]
    q = _normal(choose, bounds[0][-1], kv_heads * group, dim, dtype=q_dtype)
    k, v = (_normal(choose, bounds[1][-1], kv_heads, n, dtype=kv_dtype) for n in (dim, choose(DIMS)))
    options: dict[str, Any] = {"causal": choose([False, True]), "return_lse": choose([False, True])}
    if choose([False, True]):
        options |= {"sinks": np.arange(kv_heads * group) - 1.0, "window": (choose(ROWS), choose([0, -1, None]))}
    return [q, k, v, *bounds], options


def _torch_style(choose: Choose) -> tuple[list[Any], dict[str, Any]]:
    kv_heads, group, dtype = choose([1, 2]), choose([1, 2]), choose([np.float32, np.float64, np.float16])
    n_queries, n_keys, dim = choose(ROWS), choose(KEYS), choose(DIMS)
    q = _normal(choose, 2, kv_heads * group, n_queries, dim, dtype=dtype)
    k, v = (_normal(choose, 2, kv_heads, n_keys, dim, dtype=dtype) for _ in "kv")
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": choose([False, True])}
    if not options["is_causal"]:
        options["attn_mask"] = _normal(choose, n_queries, n_keys, dtype=dtype) > -1
    return [q, k, v], options


def _multi_head(choose: Choose) -> tuple[list[Any], dict[str, Any]]:
    n, n_heads, dim = choose(ROWS), choose([1, 2, 3]), choose(DIMS)
    dtype = choose([np.float32, np.float64])
    return [*(_normal(choose, n, n_heads * dim, dtype=dtype) for _ in "qkv"), n_heads], {}


def _self_attention(choose: Choose) -> tuple[list[Any], dict[str, Any]]:
    dim, dtype = choose(DIMS[:-1]), choose([np.float32, np.float64, np.float16])
    weights = _normal(choose, dim, 3 * dim, dtype=dtype) / dtype(8)  # no result beyond float16
    return [_normal(choose, choose(ROWS), dim, dtype=dtype), weights], {}


def _linear(choose: Choose) -> tuple[list[Any], dict[str, Any]]:
    q, k, v = _torch_style(choose)[0]
    return [q, k, v], {"causal": choose([False, True]), "scale": choose([1.0, -0.5, 0.0])}


def _states(choose: Choose) -> tuple[list[Any], dict[str, Any]]:
    n, dim, dtype, parts = choose(ROWS), choose(DIMS), choose([np.float32, np.float64]), choose([1, 2, 4])
    outs = [_normal(choose, 2, n, dim, dtype=dtype) for _ in range(parts)]
    return [outs, [_normal(choose, 2, n, dtype=dtype) for _ in range(parts)]], {}


DRAW = {
    "attention": _attention,
    "attention_varlen": _packed,
    "scaled_dot_product_attention": _torch_style,
    "multi_head_attention": _multi_head,
    "mhsa_forward": _self_attention,
    "linear_attention": _linear,
    "merge_states": _states,
}
NAMES = ["attention"] * 6 + list(DRAW)

# Wrong values of an argument, most of them wrong for every function that takes it.
FAULTY_OPTIONS: dict[str, list[Any]] = {
    "causal": [1, None, "yes"],
    "window": [3, (1, 2, 3), (-2, 0), (0.5, 0), None],
    "q_offset": [10**30, 1.5, [1, 2, 3, 4, 5, 6, 7], -(10**18), 10**18],
    "kv_lens": [-1, 10**9, 2**63, 0.5, "all", [0] * 7],
    "block_table": [[[0]], [[10**9]], np.zeros((2, 0), np.int8), -1],
    "scale": [np.nan, np.inf, "1", 1j, [1.0], 1e308, -1e-308, 10**400],
    "softcap": [-1.0, np.nan, 1e-320, 1e308, True],
    "alibi_slopes": [np.nan, [np.inf], 3.0, [1e308] * 4, np.zeros(0)],
    "sinks": [[np.nan] * 2, np.inf, [np.inf] * 4, [10**30], np.zeros((2, 2), bool)],
    "mask": [1, np.zeros(0, bool), np.full(1, np.nan), np.ones((3, 3, 3, 3, 3), bool), np.zeros(1, "M8[s]"), 1e400],
    "bias": [True, np.float16(65504), np.full((1, 1), -np.inf), np.full(1, 1e308), "0"],
    "out": [np.zeros(3), None, [0.0], np.zeros((2, 5, 7), np.float16)],
    "return_lse": [1, None],
    "num_threads": [0, -1, 2**40, 1.0, "2", 2**70],
    "progress": [0, "tqdm", [print], lambda: None],
    "nonsense": [0],
}
WILD = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-42, 0.0, 1e30, 65504.0, 1e308]


def _spoil_array(choose: Choose, array: Any) -> Any:
    """Return `array` with another shape, type or layout, or something that is no such array at all."""
    array = np.atleast_1d(array)
    ways: list[Callable[[], Any]] = [
        lambda: array[..., :-1],
        lambda: array[:-1],
        lambda: array[None],
        lambda: array[0] if array.ndim and len(array) else array,
        lambda: array.astype(
            choose([np.int8, np.float64, np.complex64, object, np.float16, np.longdouble, ">f4", bool])
        ),
        lambda: np.broadcast_to(array.ravel()[:1], (1 << 59,)) if array.size else array,
        lambda: np.broadcast_to(np.zeros((), array.dtype), (1 << 19, 1, 1 << 20, 1 << 20)),
        lambda: np.ma.masked_array(array),
        lambda: choose([None, 7, [], "text", [[1, 2], [3]], ..., float("nan")]),
        lambda: array.swapaxes(0, -1) if array.ndim else array,
    ]
    return choose(ways)()


def _make_wild(choose: Choose, array: Any) -> Any:
    """Put one extreme number at a few places of a floating array."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fV" or not array.size:
        return array
    array = array.copy()
    with np.errstate(over="ignore"):
        value = np.asarray(choose(WILD)).astype(array.dtype)
    if choose([False, True]):
        array[...] = value
    else:
        array[np.unravel_index(choose(range(array.size)), array.shape)] = value
    return array


def draw_call(choose: Choose) -> Call:
    """Draw one call: in about a third of all something is wrong, in another third some numbers are extreme."""
    name = choose(NAMES)
    arguments, options = DRAW[name](choose)
    how = choose(["plain", "plain", "wild", "wild", "spoilt", "option"])
    if how == "wild":
        arguments = [_make_wild(choose, argument) for argument in arguments]
    elif how == "spoilt":
        place = choose(range(len(arguments)))
        arguments[place] = _spoil_array(choose, arguments[place])
    elif how == "option":
        option = choose(list(FAULTY_OPTIONS))
        options[option] = choose(FAULTY_OPTIONS[option])
    return Call(name, arguments, options, legal=how in ("plain", "wild"), plain=how == "plain")


def outcome(call: Call) -> Any:
    """What a call returns, or what it raises if it may."""
    try:
        return call()
    except ALLOWED_ERRORS as error:
        if call.legal and not isinstance(error, MemoryError):
            raise AssertionError(f"{call.name} refuses a legal call") from error
        return f"{type(error).__name__}: {error}"


def same(actual: Any, expected: Any) -> bool:
    """Whether two outcomes are the same, bit for bit but for the signs of zeros and the payloads of NaN."""
    if isinstance(expected, tuple):
        return isinstance(actual, tuple) and all(same(*pair) for pair in zip(actual, expected, strict=True))
    if not isinstance(expected, np.ndarray):
        return type(actual) is type(expected) and bool(actual == expected)
    return (
        isinstance(actual, np.ndarray)
        and actual.dtype == expected.dtype
        and np.array_equal(actual.astype(np.float64), expected.astype(np.float64), equal_nan=True)
    )


def wrong_by(call: Call, result: Any) -> str | None:
    """Say how the result of a plain call differs from the oracle's, or return None.

    The bounds are several times the rounding errors of sums of this length, as a wrong key, row or head changes a
    result by far more. How near the results come to the exact ones is measured elsewhere, by `checker`.
    """
    function = getattr(reference, call.name)
    known = {*inspect.signature(function).parameters, *inspect.signature(reference.attention).parameters}
    expected = function(*call.arguments, **{n: value for n, value in call.options.items() if n in known})
    pairs = zip(result, expected, strict=True) if isinstance(expected, tuple) else [(result, expected)]
    for actual, right in pairs:
        if actual.shape != np.shape(right):
            return f"{call.name}: shape {actual.shape}, expected {np.shape(right)}"
        relative = {2: 2e-2 if actual.dtype.kind == "V" else 3e-3, 4: 2e-5, 8: 1e-13}[actual.dtype.itemsize]
        largest = np.abs(right, where=np.isfinite(right), out=np.zeros(np.shape(right))).max(initial=1.0)
        near = np.isclose(actual.astype(np.float64), right, rtol=0, atol=relative * largest, equal_nan=True)
        if not near.all():
            at = tuple(int(i) for i in np.argwhere(~near)[0])
            return f"{call.name}: {actual[at]} at {at}, expected {right[at]}, in {(~near).sum()} of {near.size} places"
    return None


def main(first: int, last: int) -> int:
    """Make the calls of the seeds [first, last), plain ones against the oracle; for sanitizers and valgrind."""
    figures = dict.fromkeys(("calls", "refused", "compared", "mismatches"), 0)
    for seed in range(first, last):
        call = draw_call(seeded(seed))
        result = outcome(call)
        figures["calls"] += 1
        figures["refused"] += isinstance(result, str)
        figures["compared"] += call.plain
        if call.plain and (wrong := wrong_by(call, result)):
            figures["mismatches"] += 1
            print(f"seed {seed}: {wrong}")
    print(figures)
    return int(figures["mismatches"] > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
