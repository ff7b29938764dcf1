"""Faults with arrays that users reported of other attention libraries: memory, bfloat16, byte order, strides.

The reference behind each test is the public report it re-tells.
"""

import sys

import ml_dtypes
import numpy as np
import pytest
from checker import assert_attention_close
from inputs import output_of

from fastattn import attention, attention_varlen, linear_attention, multi_head_attention

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def rnd(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(n_queries, n_keys, dtype=np.float32, *, batch=2, n_heads=4, n_kv_heads=2):
    return (
        rnd(batch, n_heads, n_queries, 10, dtype=dtype),
        rnd(batch, n_kv_heads, n_keys, 10, dtype=dtype, seed=1),
        rnd(batch, n_kv_heads, n_keys, 10, dtype=dtype, seed=2),
    )


# Everything is allocated before the first call; then no call may raise the high-water mark by more than its result
# and the scratch of its threads.
MEASURE = """
    import ml_dtypes
    import numpy as np
    from fastattn import attention

    def resident(kind):  # ru_maxrss would begin with what the parent process has used
        with open("/proc/self/status") as file:
            return 1024 * next(int(line.split()[1]) for line in file if line.startswith(kind))

    def ones(*shape, dtype=np.float32):
        array = np.empty(shape, dtype)
        array[...] = 1
        return array

    {inputs}
    for x in (np.float32, np.float16):
        attention(*(ones(2, 2, 40, 8, dtype=x) for _ in range(3)), causal=True)
    grew = []
    for name, arguments, options in {cases}:
        before = resident("VmRSS")
        out = attention(*arguments, **options)
        growth = resident("VmHWM") - before - out.nbytes
        grew += [f"{{name}}: {{growth / 2**20:.1f}} MiB"] * (growth > 12 * 2**20)
    print(grew)
"""

PREFILL = """
    n = 4096
    q, k, v = ones(1, 2, n, 64), ones(1, 1, n, 64), ones(1, 1, n, 64)
    square, row = ones(n, n, dtype=bool), ones(1, 1, 1, n, dtype=bool)
    square[::2, ::3] = False
    wide = ones(1, n, 4, 64).swapaxes(1, 2)
    heads_last = wide[:, :2], wide[:, 2:3], wide[:, 3:]
"""
PREFILL_CASES = """[
        ("plain", (q, k, v), {}),
        ("causal", (q, k, v), dict(causal=True)),
        ("window", (q, k, v), dict(window=(256, 0))),
        ("key mask", (q, k, v), dict(mask=row)),
        ("square mask for all heads", (q, k, v), dict(mask=square)),
        ("transposed mask", (q, k, v), dict(mask=square.T)),
        ("float16 mask and bias rows", (q, k, v), dict(mask=ones(n, dtype=np.float16), bias=ones(n, 1))),
        ("ALiBi and softcap", (q, k, v), dict(alibi_slopes=ones(2), softcap=5.0)),
        ("heads after rows", heads_last, {}),
    ]"""

DECODE = """
    n = 1 << 16
    q, k, v = ones(1, 8, 1, 64), ones(1, 2, n, 64), ones(1, 2, n, 64)
    half = ones(1, 2, n, 64, dtype=np.float16)
    short = ones(1, 2, n, 64, dtype=ml_dtypes.bfloat16)
    swapped, columns = ones(1, n, 2, 64).swapaxes(1, 2), ones(1, 2, 64, n).swapaxes(2, 3)
    table = np.arange(n // 16)[None, ::-1]
"""
DECODE_CASES = """[
        ("grouped heads", (q, k, v), {}),
        ("heads after rows", (q, swapped, swapped), {}),
        ("reversed", (q, k[:, :, ::-1], v[:, :, ::-1]), {}),
        ("every other feature", (q[..., ::2], k[..., ::2], v[..., ::2]), {}),
        ("features before rows", (q, columns, columns), {}),
        ("float16", (q.astype(np.float16), half, half), {}),
        ("float32 queries, bfloat16 keys", (q, short, short), {}),
        ("broadcast batch", (ones(16, 8, 1, 64), k[:, :, :8192], v[:, :, :8192]), {}),
        ("masked", (q, k, v), dict(mask=ones(n, dtype=bool), kv_lens=n - 5)),
        ("pages", (q, *(x.reshape(-1, 2, 16, 64) for x in (k, v))), dict(block_table=table, kv_lens=[n - 9])),
    ]"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("inputs", "cases"), [(PREFILL, PREFILL_CASES), (DECODE, DECODE_CASES)], ids=["prefill", "decode"]
)
@pytest.mark.parametrize("isa_name", ["best", "baseline"])
def test_memory_does_not_grow_with_the_sequence(inputs, cases, isa_name):
    """karpathy/nanochat#825, Comfy-Org/ComfyUI#15135, tracel-ai/burn#4777, lucidrains/x-transformers#261,
    pytorch/pytorch#152528"""
    level = None if isa_name == "best" else isa_name
    assert output_of(MEASURE.format(inputs=inputs, cases=cases), FASTATTN_ISA=level, FASTATTN_NUM_THREADS="2") == "[]"


def test_bfloat16_has_no_buffer_format(isa):
    """jax-ml/ml_dtypes#80, iree-org/iree#19471, GreenWaves-Technologies/bfloat16#9, ml-explore/mlx#3974,
    numpy/numpy#18442"""
    for n_queries in (1, 3, 40):
        q, k, v = qkv(n_queries, 37, BFLOAT16)
        with pytest.raises(ValueError, match="buffer"):
            memoryview(q)
        out, lse = attention(q, k, v, return_lse=True)
        assert out.dtype == BFLOAT16
        assert lse.dtype == np.float32
        assert_attention_close((out, lse), q, k, v, return_lse=True)
        for arrays in (
            [np.repeat(x, 3, axis=2)[:, :, ::3] for x in (q, k, v)],
            [np.repeat(x, 2, axis=3)[..., ::2] for x in (q, k, v)],
            [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (q, k, v)],
            [x.copy() for x in (q, k, v)],
        ):
            for x in arrays:
                x.flags.writeable = False
            np.testing.assert_array_equal(attention(*arrays), out)
            mixed = [q.astype(np.float32), *arrays[1:]]
            assert_attention_close(attention(*mixed), *mixed)
        into = np.zeros((2, n_queries, 4, 10), BFLOAT16).swapaxes(1, 2)
        assert attention(q, k, v, out=into) is into
        np.testing.assert_array_equal(into, out)
    assert attention(q[:0], k[:0], v[:0]).shape == (0, 4, 40, 10)
    assert attention(q, k, v, mask=rnd(37, dtype=BFLOAT16), sinks=rnd(4, dtype=BFLOAT16)).dtype == BFLOAT16


@pytest.mark.parametrize(("dtype", "digits"), [(np.float16, 10), (BFLOAT16, 7)], ids=str)
@pytest.mark.parametrize("n_queries", [1, 20])
def test_half_types_round_to_nearest_even(n_queries, dtype, digits, isa):
    """GreenWaves-Technologies/bfloat16#9: ties, NaN patterns, and the largest number."""
    unit = 2.0**-digits
    pairs = np.array([[1, 1 + unit], [1 + unit, 1 + 2 * unit], [-1, -1 - unit], [1, 1 + 4 * unit]])
    q, k = np.zeros((4, n_queries, 2), dtype), np.ones((4, 2, 2), dtype)
    out = attention(q, k, pairs[..., None].astype(dtype)).astype(np.float64)
    want = np.array([1, 1 + 2 * unit, -1, 1 + 2 * unit])
    np.testing.assert_array_equal(out, np.broadcast_to(want[:, None, None], out.shape))

    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype)  # every number there is, one attended key each
    values = numbers.reshape(64, 1, 1024)
    out = attention(np.ones((64, n_queries, 2), dtype), np.ones((64, 1, 2), dtype), values)
    with np.errstate(invalid="ignore"):  # converting a signalling NaN may warn
        wide, want = out.astype(np.float32), np.broadcast_to(values, out.shape).astype(np.float32)
    np.testing.assert_array_equal(wide, want)
    largest = float(ml_dtypes.finfo(dtype).max)
    for value in (largest, largest / 2):
        out = attention(q, k[:, :1], np.full((4, 1, 3), value, dtype), sinks=np.full(4, -np.inf))
        np.testing.assert_array_equal(out.astype(np.float64), value)


def test_bfloat16_package_is_not_needed():
    """jax-ml/ml_dtypes#80: everything else works where ml_dtypes cannot be imported."""
    code = """
        import sys
        sys.modules["ml_dtypes"] = None
        import numpy as np, fastattn
        for dtype in (np.float16, np.float32, np.float64):
            x = np.ones((1, 2, 3, 4), dtype)
            print(fastattn.attention(x, x, x, mask=np.zeros(3, np.float16)).sum())
    """
    assert output_of(code).split() == ["24.0", "24.0", "24.0"]


def swap(array):
    """Return the same numbers in the byte order that is not this machine's."""
    swapped = np.asarray(array)
    swapped = swapped.astype(swapped.dtype.newbyteorder("S"))
    assert not swapped.dtype.isnative
    return swapped


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_byte_order_of_every_argument(dtype, isa):
    """pydata/bottleneck#104, silx-kit/silx#1146, cython/cython#6160"""
    for n_queries in (1, 3, 40):
        arrays = dict(zip("qkv", qkv(n_queries, 12, dtype), strict=True))
        np.testing.assert_array_equal(attention(*map(swap, arrays.values())), attention(**arrays))
        plain = attention(**arrays)
        assert plain.dtype.isnative
        options = {
            "mask": rnd(n_queries, 12, dtype=dtype, seed=3),
            "bias": rnd(4, 1, 12, seed=4),
            "q_offset": np.array([3, 5], np.int32),
            "kv_lens": np.array([7, 12]),
            "alibi_slopes": rnd(2, 4, dtype=dtype, seed=5),
            "sinks": rnd(4, dtype=np.float64, seed=6),
            "scale": np.float64(0.25),
            "softcap": np.array(3.0, dtype),
        }
        everything = arrays | options
        want = attention(**everything, causal=True)
        assert_attention_close(want, *arrays.values(), **options, causal=True)
        for name, value in everything.items():
            out = attention(**everything | {name: swap(value)}, causal=True)
            np.testing.assert_array_equal(out, want, err_msg=name)
    pages = [x.reshape(2, 2, 3, 4, 10).swapaxes(1, 2).reshape(6, 2, 4, 10) for x in (arrays["k"], arrays["v"])]
    paged = {"block_table": np.arange(6).reshape(2, 3), "kv_lens": np.array([7, 12])}
    want = attention(arrays["q"], *pages, **paged)
    np.testing.assert_array_equal(attention(arrays["q"], *pages, **{n: swap(x) for n, x in paged.items()}), want)
    packed, bounds = [rnd(9, 2, 4, dtype=dtype, seed=seed) for seed in range(3)], np.array([0, 4, 9])
    want = attention_varlen(*packed, bounds)
    np.testing.assert_array_equal(attention_varlen(*packed, swap(bounds), swap(bounds)), want)
    np.testing.assert_array_equal(attention_varlen(*map(swap, packed), bounds), want)
    rows = [rnd(5, 8, dtype=dtype, seed=seed) for seed in range(3)]
    for function in (linear_attention, lambda *x: multi_head_attention(*x, 2)):
        np.testing.assert_array_equal(function(*map(swap, rows)), function(*rows))


def test_byte_order_of_out(isa):
    """pydata/bottleneck#104: the result could not be told from a wrong one, so the array is refused untouched."""
    q, k, v = qkv(3, 5)
    out = np.full(q.shape, 7, q.dtype.newbyteorder("S"))
    with pytest.raises(TypeError, match="out must have dtype float32"):
        attention(q, k, v, out=out)
    assert (out == 7).all()
    attention(q, k, v)


def views(array):
    """Yield the same numbers in other memory: permuted, reversed, with steps, on odd addresses, inside records."""
    yield np.asfortranarray(array)
    yield array.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    yield array.transpose(2, 3, 0, 1).copy().transpose(2, 3, 0, 1)
    yield array.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    yield array[..., ::-1].copy()[..., ::-1]
    yield array[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1]
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), 9, array.dtype)
    wide[..., ::2] = array
    yield wide[..., ::2]
    padded = np.full((*array.shape[:2], 3 * array.shape[2], array.shape[3] + 5), 9, array.dtype)
    padded[:, :, ::3, 2:-3] = array
    yield padded[:, :, ::3, 2:-3]
    odd = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    odd[...] = array
    yield odd
    if array.dtype != BFLOAT16:
        records = np.zeros(array.shape, [("before", np.uint8), ("number", array.dtype)])
        records["number"] = array
        yield records["number"]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0, "return_lse": True}], ids=str)
@pytest.mark.parametrize("n_queries", [1, 9, 40])
def test_any_strides_of_any_argument(n_queries, options, dtype, isa):
    """pytorch/pytorch#187506, #112577 and #181133; flagos-ai/FlagGems#5896 and #5235"""
    inputs = qkv(n_queries, 21, dtype)
    want = attention(*inputs, **options)
    assert_attention_close(want, *inputs, **options)
    for position in range(3):
        for view in views(inputs[position]):
            arrays = list(inputs)
            arrays[position] = view
            before = view.copy()
            got = attention(*arrays, **options)
            np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(want[0]))
            np.testing.assert_array_equal(view, before)
    result = want[0] if options else want
    for view in views(np.full(result.shape, 7, dtype)):
        got = attention(*inputs, out=view, **options)
        assert (got[0] if options else got) is view
        np.testing.assert_array_equal(view, result)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n_queries", [1, 5, 40])
def test_overlapping_and_broadcast_views(n_queries, dtype, isa):
    """pytorch/pytorch#181133: windows into one buffer, stride 0, and one array in all three roles."""
    flat = rnd(60, dtype=dtype)
    windows = np.lib.stride_tricks.sliding_window_view(flat, 8)[None, None]
    q = rnd(1, 2, n_queries, 8, dtype=dtype)
    for k, v in (
        (windows, windows),
        (windows[:, :, ::-1], windows[..., :3]),
        (windows[:, :, :-3], windows[:, :, 3:]),
        (np.broadcast_to(flat[:8], (1, 1, 33, 8)), np.broadcast_to(flat[0], (1, 1, 33, 5))),
        (np.broadcast_to(flat[:33, None], (1, 1, 33, 8)), np.broadcast_to(flat[:33, None], (1, 1, 33, 8))),
    ):
        assert_attention_close(attention(q, k, v), q, k, v)
    whole = windows[..., :n_queries, :]
    assert_attention_close(attention(whole, whole, whole, causal=True), whole, whole, whole, causal=True)
    shared = np.broadcast_to(q[:, :1, :1], (3, 4, n_queries, 8))
    out = attention(shared, windows, windows)
    np.testing.assert_array_equal(out, np.broadcast_to(out[0, 0, 0], out.shape))
