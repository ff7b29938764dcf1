"""`linear_attention`: values, chunk edges, non-finite data, inputs and errors; memory of both linear functions."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from checker import assert_linear_close
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn import _linear, linear_attention

BFLOAT16 = ml_dtypes.bfloat16
DTYPES = [np.float32, np.float64, np.float16, BFLOAT16]
dtypes = st.sampled_from(DTYPES)
few = st.integers(0, 5)


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(lead=(), heads=1, kv_heads=1, n=4, s=4, d=3, e=2, dtype=np.float32, seed=0):
    q, k = normal(*lead, heads, n, d, dtype=dtype, seed=seed), normal(*lead, kv_heads, s, d, dtype=dtype, seed=seed + 1)
    return q, k, normal(*lead, kv_heads, s, e, dtype=dtype, seed=seed + 2)


@settings(deadline=None, max_examples=150)
@given(
    dtype=dtypes, lead=st.lists(few, max_size=2), kv_heads=st.integers(1, 3), group=st.integers(0, 3), n=few, s=few,
    d=few, e=few, causal=st.booleans(), scale=st.sampled_from([1.0, 0.5, -2.0, 0.0]), seed=few,
)  # fmt: skip
def test_linear_against_oracle(dtype, lead, kv_heads, group, n, s, d, e, causal, scale, seed):
    arrays = qkv(lead, kv_heads * group, kv_heads, n, s, d, e, dtype, seed)
    options = {"causal": causal, "scale": scale}
    if group == 0:  # the oracle wants at least one head
        assert linear_attention(*arrays, **options).shape == (*lead, 0, n, e)
    else:
        assert_linear_close(linear_attention(*arrays, **options), "linear_attention", *arrays, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("n", "s"),
    [
        (1, 3000),
        (3, 1025),
        (300, 1),
        (127, 127),
        (128, 128),
        (129, 129),
        (257, 1024),
        (130, 400),
        (400, 130),
        (513, 513),
    ],
)
def test_linear_around_the_chunk_edges(n, s, dtype, causal):
    arrays = qkv((), 4, 2, n, s, 8, 5, dtype)
    assert_linear_close(linear_attention(*arrays, causal=causal), "linear_attention", *arrays, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scratch", [1, 3000, 20000])
def test_linear_cut_into_small_pieces(monkeypatch, scratch, causal):
    arrays = qkv((2, 3), 4, 2, 20, 30, 4, 3)
    monkeypatch.setattr(_linear, "SCRATCH_SIZE", scratch)
    assert_linear_close(linear_attention(*arrays, causal=causal), "linear_attention", *arrays, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_broadcasts_leading_axes(causal):
    q, k, v = normal(3, 1, 4, 6, 5), normal(2, 2, 7, 5, seed=1), normal(1, 1, 2, 7, 3, seed=2)
    actual = linear_attention(q, k, v, causal=causal)
    assert actual.shape == (3, 2, 4, 6, 3)
    assert_linear_close(actual, "linear_attention", q, k, v, causal=causal)


def test_linear_two_axes_stand_for_one_head():
    q, k, v = qkv()
    expected = linear_attention(q, k, v)
    np.testing.assert_array_equal(linear_attention(q[0], k[0], v[0]), expected[0])
    np.testing.assert_array_equal(linear_attention(q[0], k, v[0]), expected)
    np.testing.assert_array_equal(
        linear_attention(normal(4, 4, 3), k[0], v[0]), linear_attention(normal(4, 4, 3), k, v)
    )


@pytest.mark.parametrize("s", [300, 340])
def test_linear_causal_rows_depend_on_their_prefix_alone(s):
    n = 300
    q, k, v = qkv((), 2, 1, n, s, 8, 8)
    full = linear_attention(q, k, v, causal=True)
    for stop in (1, 2, 127, 128, 129, 250):
        part = linear_attention(q[:, :stop], k[:, : s - n + stop], v[:, : s - n + stop], causal=True)
        np.testing.assert_allclose(part, full[:, :stop], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(full[:, -1:], linear_attention(q[:, -1:], k, v), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 5, 127, 128, 200, 299])
@pytest.mark.parametrize("name", ["k", "v"])
def test_linear_causal_keeps_the_future_out(name, position, bad):
    q, k, v = qkv((), 2, 1, 300, 300, 4, 3)
    clean = linear_attention(q, k, v, causal=True)
    (k if name == "k" else v)[0, position, 1] = bad
    actual = linear_attention(q, k, v, causal=True)
    np.testing.assert_allclose(actual[:, :position], clean[:, :position], rtol=1e-5, atol=1e-4)
    columns = slice(None) if name == "k" else 1  # a value reaches its own column only
    assert not np.isfinite(actual[:, position:, columns]).any()
    if name == "v":
        np.testing.assert_allclose(actual[..., ::2], clean[..., ::2], rtol=1e-5, atol=1e-4)


def test_linear_rows_that_see_nothing_are_zero():
    q, k, v = qkv((), 1, 1, 6, 4)
    q[0, 0] = np.nan
    actual = linear_attention(q, k, v, causal=True)
    assert not actual[0, :2].any()
    assert actual[0, 2:].all()
    for causal in (False, True):
        assert not linear_attention(q, k[:, :0], v[:, :0], causal=causal).any()


@pytest.mark.parametrize("causal", [False, True])
def test_linear_nan_of_a_query_stays_in_its_row(causal):
    q, k, v = qkv((), 2, 1, 300, 300, 4, 3)
    q[1, 200, 0] = np.nan
    bad = np.isnan(linear_attention(q, k, v, causal=causal))
    assert bad[1, 200].all()
    assert bad.sum() == 3


@pytest.mark.parametrize("causal", [False, True])
def test_linear_warns_of_nothing_under_a_strict_error_state(causal):
    q, k, v = (np.full((1, 4, 2), 6e4, np.float16) for _ in range(3))
    with np.errstate(all="raise"):
        assert np.isposinf(linear_attention(q, k, v, causal=causal)).all()


@pytest.mark.parametrize(
    "scale",
    [2, 0.5, np.float64(0.1), np.float32(-3), np.int8(2), np.array(0.5), BFLOAT16(2)],
)
def test_linear_scale_never_changes_the_dtype(scale):
    for dtype in DTYPES:
        arrays = qkv(dtype=dtype)
        assert_linear_close(linear_attention(*arrays, scale=scale), "linear_attention", *arrays, scale=float(scale))


def test_linear_scale_beyond_the_range_of_the_type_is_clamped():
    one = np.ones((1, 1), np.float32)
    assert linear_attention(one, one, one, scale=-1e300) == np.finfo(np.float32).min
    assert linear_attention(one, 0 * one, one, scale=1e300) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_linear_inputs_of_any_layout_stay_untouched(causal):
    arrays = qkv((2,), 4, 2, 20, 20, 4, 4)
    expected = linear_attention(*arrays, causal=causal, scale=0.5)
    layouts = [
        np.asfortranarray,
        lambda a: a.astype(a.dtype.newbyteorder()),
        lambda a: a.swapaxes(1, 2).copy().swapaxes(1, 2),
        lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
        lambda a: a[:, ::-1, ::-1, ::-1].copy()[:, ::-1, ::-1, ::-1],
    ]
    for layout in layouts:
        views = [layout(array) for array in arrays]
        for view in views:
            view.flags.writeable = False
        actual = linear_attention(*views, causal=causal, scale=0.5)
        assert actual.dtype.isnative
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        for view, array in zip(views, arrays, strict=True):
            np.testing.assert_array_equal(view, array)


def test_linear_lists_and_integers_become_float64():
    q, k, v = [[1, 0], [0, 1]], np.array([[2, 3], [5, 7]]), np.array([[True], [False]])
    actual = linear_attention(q, k, v)
    np.testing.assert_array_equal(actual, [[2.0], [3.0]])
    assert actual.dtype == np.float64


Q, K, V = qkv((), 4, 2)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ((Q, normal(2, 4, 5), V), {}, ValueError, r"k must have shape \(..., 2, 4, 3\) to match q .* got \(2, 4, 5\)"),
        ((Q, K, V[:, :3]), {}, ValueError, r"v must have shape \(..., 2, 4, E\) to match k .* got \(2, 3, 2\)"),
        ((Q, K, V[:1]), {}, ValueError, r"k and v must have the same number of heads, got 2 and 1"),
        ((Q[:3], K, V), {}, ValueError, r"q's number of heads must be a multiple of k's, got 3 and 2"),
        ((Q, K[:0], V[:0]), {}, ValueError, r"k and v must have at least one head for q's 4 heads, got 0"),
        ((Q, K[0, 0], V), {}, ValueError, r"k must have shape .* got \(3,\)"),
        ((normal(2, 4, 4, 3), normal(3, 2, 4, 3), V), {}, ValueError, r"must broadcast, got \(2,\), \(3,\) and \(\)"),
        ((Q, K, V.astype(np.float64)), {}, TypeError, r"k and v must have the same dtype, got float32 and float64"),
        ((Q, K.tolist(), V.tolist()), {}, TypeError, r"q, k and v must .* got float32, float64 and float64"),
        (
            (Q, K.astype("f2"), V.astype("f2")),
            {},
            TypeError,
            r"q, k and v must have the same dtype, got float32, float16",
        ),
        ((Q, K, V * 1j), {}, TypeError, r"v must be float32, .* got complex64"),
        ((Q, None, V), {}, TypeError, r"k must be .* got object"),
        ((Q, K, V), {"causal": 1}, TypeError, r"causal must be True or False, got 1"),
        ((Q, K, V), {"scale": np.nan}, ValueError, r"scale must be finite, got nan"),
        ((Q, K, V), {"scale": -np.inf}, ValueError, r"scale must be finite, got -inf"),
        ((Q, K, V), {"scale": np.ones(1)}, TypeError, r"scale must be one real number, got array"),
        ((Q, K, V), {"scale": "1"}, TypeError, r"scale must be one real number, got '1'"),
        ((Q, K, V), {"scale": None}, TypeError, r"scale must be one real number, got None"),
        ((Q, K, V), {"scale": 1j}, TypeError, r"scale must be one real number, got 1j"),
    ],
)
def test_linear_errors(arrays, options, error, message):
    with pytest.raises(error, match=message):
        linear_attention(*arrays, **options)


# --- memory ---

MEASURE = """
import os
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # spinning threads crawl on a busy machine
import numpy as np
from fastattn import linear_attention, mhsa_forward
def peak():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
def arrays(*shapes):
    return [np.full(shape, 0.001, np.float32) for shape in shapes]
mhsa_forward(*arrays((600, 64), (64, 192)))  # lets the matrix library set up its buffers
{prepare}
before = peak()
out = {call}
print((peak() - before) / 2**20, out.nbytes / 2**20)
"""


@pytest.mark.parametrize(
    ("prepare", "call"),
    [
        ("x, w = arrays((200_000, 64), (64, 192))", "mhsa_forward(x, w)"),
        ("x, w = arrays((50_000, 4, 64), (64, 192)); x = x.swapaxes(0, 1)", "mhsa_forward(x, w)"),
        ("q, k = arrays((1, 200_000, 64), (1, 200_000, 64))", "linear_attention(q, k, k)"),
        ("q, k = arrays((1, 200_000, 64), (1, 200_000, 64))", "linear_attention(q, k, k, causal=True)"),
        ("q, k = arrays((1, 1, 4096), (1, 1000, 4096))", "linear_attention(q, k, k)"),
        ("q, k = arrays((32, 8, 64), (1, 200_000, 64))", "linear_attention(q, k, k, causal=True)"),
        ("q, k = arrays((8, 20_000, 64), (64, 200_000)); k = k.T", "linear_attention(q, k, k, causal=True)"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_the_result(prepare, call):
    script = MEASURE.format(prepare=prepare, call=call)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    growth, result = map(float, done.stdout.split())
    assert growth < result + 48
