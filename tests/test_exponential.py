"""The kernels' exponential and tanh, read out of `attention` without any further rounding.

Two keys of scores 0 and x get weights 1 and 2**(unit * x) over their sum. A sink so high that nothing else counts
makes the divisor 2**k, bit for bit, and values of 2**k take it away again: the outputs are the numerators. A third key
like the second goes through the loop's tail. With one query this is the decode kernel, with many the prefill kernel.

One key alone leaves the logarithm of the sum equal to its score: with ``softcap=1`` that is tanh.
"""

import math

import numpy as np
import pytest

from fastattn import attention

LOWEST = {np.float32: -87.0, np.float64: -708.0}  # e**x is a normal number down to here
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])
loops = pytest.mark.parametrize("loop", ["prefill", "decode"])


def needs_more_precision(dtype):
    """Where long double is double there is nothing to compare float64 with."""
    if np.finfo(np.longdouble).eps >= np.finfo(dtype).eps:
        pytest.skip("numpy.longdouble is no wider than float64 here")


def sink_of(dtype):
    """k, for a sink of k * log(2) that makes every divisor exactly 2**k."""
    if dtype == np.float32:
        return 40
    exact = [k for k in range(60, 400) if math.exp(-k * math.log(2)) == 2.0**-k]
    if not exact:
        pytest.skip("this C library's exp gives no exact power of two")
    return exact[0]


def call(scores, keys, values, loop, **options):
    """Attention of queries (n,) or (n, D) to keys (S, D), values (S, E): n rows of one call, or n calls of one row."""
    q = scores.reshape(len(scores), -1)
    if loop == "prefill":
        assert len(q) > 8, "so few rows would be decoded"
        return attention(q[None], keys[None], values[None], **options)
    return attention(
        q[:, None, None],
        np.broadcast_to(keys, (len(q), 1, *keys.shape)),
        np.broadcast_to(values, (len(q), 1, *values.shape)),
        **options,
    )


def exponentials(x, scale, loop):
    """exp(scale * x) for x <= 0, as the kernels compute it."""
    dtype = x.dtype.type
    k = sink_of(dtype)
    keys = np.array([[0], [1], [1]], dtype)
    out = call(x, keys, np.eye(3, dtype=dtype) * dtype(2.0**k), loop, scale=scale, sinks=[k * math.log(2)])
    out = out.reshape(len(x), 3)
    np.testing.assert_array_equal(out[:, 0], 1)  # the divisor is what it should be, and 2**0 is 1
    np.testing.assert_array_equal(out[:, 1], out[:, 2])
    return out[:, 1]


def power_of_two(x, unit):
    """2**(x * unit): the product's fraction comes from halves whose products are exact."""
    x, unit = x.astype(np.float64), np.float64(unit)
    whole = np.rint(x * unit)
    x_high, unit_high = x.astype(np.float32).astype(np.longdouble), np.longdouble(np.float32(unit))
    x_low, unit_low = x - x_high, unit - unit_high
    fraction = (x_high * unit_high - whole) + (x_high * unit_low + x_low * unit_high) + x_low * unit_low
    return np.ldexp(np.exp2(fraction), whole.astype(int))


def samples(dtype, lowest):
    """Sorted: all of [lowest, 0], the end that matters most, and towards 0."""
    parts = [np.linspace(lowest, 0, 40001), np.linspace(-3, 0, 40001), -np.exp2(-np.linspace(0, 60, 6001))]
    return np.sort(np.concatenate(parts).astype(dtype))


def ulps(actual, expected, dtype):
    return abs(actual - expected) / np.spacing(abs(expected).astype(dtype))


@dtypes
@loops
def test_exponential_is_close_to_the_power_of_two(isa, dtype, loop):
    # Measured with 2,000,000 samples: float32 2.02 ulp with fused multiply-adds, 2.24 without, 1.72 with a table;
    # float64 0.93, 1.21 and 1.09.
    # (Where exponents are not exact, fused multiply-adds give 2.14 and 1.03 ulp of 2**(unit * x).)
    needs_more_precision(dtype)
    x = samples(dtype, -126.0 if dtype == np.float32 else -1022.0)
    scale = math.log(2)
    assert dtype(scale * 1.4426950408889634) == 1, "this scale makes the exponents exact"
    error = ulps(exponentials(x, scale, loop), power_of_two(x, 1.0), dtype)
    worst = int(error.argmax())
    assert error[worst] <= (2.3 if dtype == np.float32 else 1.25), f"at {x[worst]!r}"


@dtypes
@loops
@pytest.mark.parametrize("scale", [1.0, 0.125, 0.3])
def test_exponential_is_no_worse_than_a_rounded_score(isa, dtype, loop, scale):
    # The base's change multiplies scores by a rounded number, and without fused multiply-adds rounds the product: like
    # a relative change of the score. Measured: 1.6 eps (float32), 0.9 eps (float64), and per unit of |score| at most
    # 0.11 and 0.24 eps with fused multiply-adds, 0.59 and 0.74 without. NumPy's rounding of scaled scores does 0.5.
    needs_more_precision(dtype)
    x = np.maximum(samples(dtype, LOWEST[dtype]) / dtype(scale), dtype(LOWEST[dtype] / scale))
    scores = x.astype(np.longdouble) * np.longdouble(scale)
    relative = abs(exponentials(x, scale, loop) / np.exp(scores) - 1) / np.finfo(dtype).eps
    excess = relative - abs(scores) - (1.75 if dtype == np.float32 else 1.0)
    assert excess.max() <= 0, f"at score {scores[excess.argmax()]!r}"


@dtypes
@loops
def test_exponential_grows_with_its_argument(isa, dtype, loop):
    x = samples(dtype, LOWEST[dtype])
    y = exponentials(x, 1.0, loop)
    assert y.max() == y[-1] == 1
    assert y.min() > 0
    assert (np.diff(y) >= -np.spacing(y[1:])).all()  # measured: it falls back by one ulp at most


@dtypes
@loops
def test_exponential_of_what_is_far_below_is_exactly_0(isa, dtype, loop):
    far = -130.0 if dtype == np.float32 else -1030.0
    x = np.array([far, far - 0.5, 10 * far, -1e5, -1e30, -np.finfo(dtype).max] * 2, dtype)
    np.testing.assert_array_equal(exponentials(x, math.log(2), loop), 0)


@dtypes
@loops
def test_exponential_of_minus_infinity_is_exactly_0(isa, dtype, loop):
    keys = np.array([[-np.inf], [0], [-np.inf], [-np.finfo(dtype).max], [-np.inf]], dtype)
    out = call(np.ones(9, dtype), keys, np.eye(5, dtype=dtype), loop, scale=1.0)
    np.testing.assert_array_equal(out.reshape(9, 5), np.tile(np.eye(5, dtype=dtype)[1], (9, 1)))


@dtypes
@loops
def test_nan_stays_nan_whatever_its_payload(isa, dtype, loop):
    # An exponential that shifts and adds bits can turn some payloads into numbers.
    mantissa = np.finfo(dtype).nmant
    integer = np.uint32 if dtype == np.float32 else np.uint64
    infinity = int(np.array(np.inf, dtype).view(integer))
    sign, quiet = 1 << (8 * dtype().itemsize - 1), 1 << (mantissa - 1)
    payloads = [quiet, 1, quiet | 0x12345, (1 << mantissa) - 1, (1 << mantissa) - 2, 1 << (mantissa - 2)]
    bits = [0, *(infinity | payload for payload in payloads), 0, *(sign | infinity | p for p in payloads), 0]
    x = np.array(bits, integer).view(dtype)
    keys = np.array([[-1], [1], [2]], dtype)
    out = call(x, keys, np.eye(3, dtype=dtype), loop, scale=1.0).reshape(len(x), 3)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(x)[:, None].repeat(3, axis=1))
    np.testing.assert_array_equal(out[~np.isnan(x)], dtype(1) / dtype(3))


@dtypes
@loops
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.3])
def test_weights_depend_on_differences_of_exact_scores_alone(isa, dtype, loop, scale):
    # Scores c and c - d are integers, so nothing is rounded before the exponent: large ones lose nothing.
    falls = np.arange(40, dtype=dtype)
    keys = np.array([[1, 0], [1, -1], [1, -2]], dtype)

    def weights(height):
        queries = np.stack([np.full_like(falls, height), falls], axis=1) * np.sign(scale).astype(dtype)
        return call(queries, keys, np.eye(3, dtype=dtype), loop, scale=scale).reshape(len(falls), 3)

    expected = weights(0)
    assert expected[0].tolist() == [dtype(1) / dtype(3)] * 3
    for height in (40_000, 1_000_003, -8_000_001):
        np.testing.assert_array_equal(weights(height), expected)


def capped(x, loop, cap=1.0):
    """cap * tanh(x / cap), as the kernels compute it."""
    one = np.ones((1, 1), x.dtype)
    return call(x, one, one, loop, scale=1.0, softcap=cap, return_lse=True)[1].ravel()


@dtypes
@loops
@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_tanh_is_close(isa, dtype, loop, cap):
    # Measured with 1,000,000 samples at cap 1: relative error 1.69 eps (float32), 1.46 eps (float64). Dividing and
    # multiplying by another cap adds at most half an eps each.
    needs_more_precision(dtype)
    small = np.exp2(-np.linspace(0, 100, 5001))
    x = np.concatenate([np.linspace(-25, 25, 20001), np.linspace(-1, 1, 20001), small, -small]).astype(dtype) * dtype(
        cap
    )
    x = x[x != 0]
    expected = cap * np.tanh(x.astype(np.longdouble) / cap)
    error = abs(capped(x, loop, cap) / expected - 1) / np.finfo(dtype).eps
    worst = int(error.argmax())
    assert error[worst] <= (1.8 if cap == 1 else 2.8), f"at {x[worst]!r}"


@dtypes
@loops
def test_tanh_at_its_ends(isa, dtype, loop):
    x = np.array([0, 20, 1e5, np.finfo(dtype).max, np.inf, np.nan, 0.1, 0.6249, 0.625, 3], dtype)
    y = capped(x, loop)
    np.testing.assert_array_equal(y[:6], [0, 1, 1, 1, 1, np.nan])
    np.testing.assert_array_equal(capped(-x, loop), -y)
