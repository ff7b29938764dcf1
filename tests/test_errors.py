"""What is refused, with which type and in which words; and that a call which raises has written nothing."""

import re

import numpy as np
import pytest
from inputs import normal, qkv

import fastattn
from fastattn import _attention, _call, attention, scaled_dot_product_attention

B, H, K, N, S, D = 2, 4, 2, 5, 37, 8


class _NoKernel:
    """Stands in for the kernel module: a check that comes too late shows."""

    def __getattr__(self, name):
        if name == "max_threads":
            return lambda: 1
        if name == "attention_common":  # checks by itself, and gives None for what needs a message
            return lambda *arguments: None
        raise AssertionError(f"the kernel's {name} was reached")


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch):
    for module in (_attention, _call):
        monkeypatch.setattr(module, "kernel", _NoKernel())


def refused(error, match, q=None, k=None, v=None, **options):
    """Assert that the call raises, and that `out` keeps its bytes."""
    given = dict(zip("qkv", qkv(B, H, K, N, S, D), strict=True))
    given |= {name: value for name, value in (("q", q), ("k", k), ("v", v)) if value is not None}
    out = np.full((B, H, N, D), 7, np.float32)
    with pytest.raises(error, match=match) as raised:
        attention(**given, **({"out": out} | options))
    assert (out == 7).all()
    assert "\n" not in str(raised.value)


BAD_KINDS = {
    "complex": np.ones((B, H, N, D), complex),
    "text": np.full((B, H, N, D), "a"),
    "objects": np.full((B, H, N, D), None),
    "times": np.zeros((B, H, N, D), "M8[s]"),
}


@pytest.mark.parametrize("kind", BAD_KINDS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_kinds_of_q_k_v(name, kind):
    array = BAD_KINDS[kind]
    refused(TypeError, f"^{name} must be float32, .*, got {re.escape(str(array.dtype))}$", **{name: array})


@pytest.mark.skipif(np.finfo(np.longdouble).bits == 64, reason="long double is float64 here")
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_long_double_is_refused(name):
    array = np.ones((B, H, N, D), np.longdouble)
    refused(TypeError, f"^{name} must be float32, .*, got {array.dtype}$", **{name: array})


def test_masked_arrays_are_refused():
    refused(TypeError, "q must not be a masked array.*pass mask=", q=np.ma.masked_array(normal(B, H, N, D)))
    refused(TypeError, "mask must not be a masked array", mask=np.ma.masked_array(np.ones((N, S), bool)))


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ("float64", "float32", "float32"), ("float32", "float64", "float64"), ("float16", "float32", "float32"),
        ("float16", "float64", "float64"), ("float64", "float16", "float16"), ("int64", "float32", "float32"),
        ("float32", "int8", "int8"), ("float32", "bool", "bool"),
    ],
)  # fmt: skip
def test_mixed_dtypes(q, k, v):
    arrays = [x.astype(dtype) for x, dtype in zip(qkv(B, H, K, N, S, D), (q, k, v), strict=True)]
    got = [str(x.dtype) if x.dtype.kind == "f" else rf"{x.dtype} \(taken as float64\)" for x in arrays]
    refused(TypeError, f"q, k and v must have the same dtype .*got {got[0]}, {got[1]} and {got[2]}$", *arrays)


def test_mixed_half_types():
    q, k, v = qkv(B, H, K, N, S, D, dtypes="float16")
    bfloat16 = qkv(B, H, K, N, S, D, dtypes="bfloat16")
    refused(TypeError, "q, k and v must have the same dtype.*bfloat16", bfloat16[0], k, v)
    refused(TypeError, "k and v must have the same dtype, got float16 and bfloat16", q, k, bfloat16[2])


def test_k_and_v_of_different_dtypes():
    v = normal(B, K, S, D)
    refused(TypeError, "k and v must have the same dtype, got float32 and float16", v=v.astype(np.float16))
    refused(TypeError, "k and v must have the same dtype, got float32 and float64", v=v.tolist())


@pytest.mark.parametrize(
    ("match", "q", "k", "v"),
    [
        (r"q must have shape .*got \(8,\)", (8,), (S, D), (S, D)),
        (r"q must have shape .*got \(\)", (), (S, D), (S, D)),
        (r"k must have shape .*got \(37,\)", (N, D), (S,), (S, D)),
        (r"v must have shape .*got \(37,\)", (N, D), (S, D), (S,)),
        (r"k must have shape \(\.\.\., 2, 37, 8\) to match q .*got \(2, 2, 37, 7\)", None, (B, K, S, 7), None),
        (r"v must have shape \(\.\.\., 2, 37, E\) to match k .*got \(2, 2, 36, 8\)", None, None, (B, K, S - 1, D)),
        (r"v must have shape .*got \(2, 2, 38, 8\)", None, None, (B, K, S + 1, D)),
        (r"k and v must have the same number of heads, got 2 and 4", None, None, (B, 4, S, D)),
        (r"k and v must have the same number of heads, got 2 and 1", None, None, (B, 1, S, D)),
        (r"q's number of heads must be a multiple of k's, got 4 and 3", None, (B, 3, S, D), (B, 3, S, D)),
        (r"q's number of heads must be a multiple of k's, got 4 and 8", None, (B, 8, S, D), (B, 8, S, D)),
        (r"k and v must have at least one head for q's 4 heads, got 0", None, (B, 0, S, D), (B, 0, S, D)),
        (r"leading axes .* must broadcast, got \(2,\), \(3,\) and \(3,\)", None, (3, K, S, D), (3, K, S, D)),
        (r"leading axes .* must broadcast, got \(2,\), \(2,\) and \(3,\)", None, None, (3, K, S, D)),
    ],
)
def test_shapes(match, q, k, v):
    arrays = {
        name: normal(*shape) if shape else np.float32(1)
        for name, shape in (("q", q), ("k", k), ("v", v)) if shape is not None
    }  # fmt: skip
    refused(ValueError, match, **arrays)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32, complex, "U1"])
def test_masks_of_other_kinds(dtype):
    mask = np.ones((N, S), bool).astype(dtype)
    refused(TypeError, "mask must be bool .* or float .*use bool for keep/drop, float to add; got", mask=mask)
    refused(TypeError, "bias must be float", bias=mask)


def test_bias_is_not_a_bool():
    refused(TypeError, "bias must be float .*got bool", bias=np.ones((N, S), bool))
    refused(TypeError, "mask must be bool .*got int", mask=[1, 0] * 18 + [1])


@pytest.mark.parametrize("shape", [(S + 1,), (N, S - 1), (3, 1, 1), (3, 1, 1, 1), (1, B, H, N, S), (N + 1, 1), (0,)])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_masks_that_do_not_broadcast(name, shape):
    match = rf"{name} must broadcast to \(\.\.\., H, N, S\) = \(2, 4, 5, 37\), got shape \({shape[0]},"
    refused(ValueError, match, **{name: normal(*shape)})


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (TypeError, "causal must be True or False, got 1", {"causal": 1}),
        (TypeError, "causal must be True or False, got None", {"causal": None}),
        (TypeError, "return_lse must be True or False, got 'yes'", {"return_lse": "yes"}),
        (TypeError, "window must be a pair .*got 5", {"window": 5}),
        (ValueError, "window must be a pair .*got 1 values", {"window": (5,)}),
        (ValueError, "window must be a pair .*got 3 values", {"window": (5, 0, 0)}),
        (TypeError, "window's left side must be an integer or None, got 1.0", {"window": (1.0, 0)}),
        (TypeError, "window's right side must be an integer or None, got 'a'", {"window": (1, "a")}),
        (ValueError, "window's left side must be at least 0, or -1 or None .*got -2", {"window": (-2, 0)}),
        (ValueError, "window's right side must be at least 0, or -1 or None .*got -9", {"window": (0, -9)}),
        (TypeError, "q_offset must be integers, got float64", {"q_offset": 1.0}),
        (TypeError, "q_offset must be integers, got bool", {"q_offset": True}),
        (ValueError, r"q_offset must be one integer or have shape \(2,\), got \(3,\)", {"q_offset": [1, 2, 3]}),
        (TypeError, "kv_lens must be integers, got float64", {"kv_lens": [1.0, 2.0]}),
        (ValueError, r"kv_lens must be one integer or have shape \(2,\), got \(1,\)", {"kv_lens": [1]}),
        (ValueError, r"kv_lens must be one integer or have shape \(2,\), got \(2, 1\)", {"kv_lens": [[1], [2]]}),
        (ValueError, "kv_lens must lie in 0 ... 37.*got 38", {"kv_lens": [1, 38]}),
        (ValueError, "kv_lens must lie in 0 ... 37.*got -1", {"kv_lens": -1}),
        (ValueError, "kv_lens must fit 64-bit signed integers, got 1844", {"kv_lens": np.uint64(2**64 - 1)}),
        (ValueError, "kv_lens must fit 64-bit signed integers, got 1844", {"kv_lens": 2**64}),
        (ValueError, "kv_lens must fit 64-bit signed integers, got 9223", {"kv_lens": [-1, 2**63]}),
        (TypeError, "kv_lens must be integers, got object", {"kv_lens": [None, 2**63]}),
        (ValueError, "q_offset must fit 64-bit signed integers, got -1844", {"q_offset": -(2**64)}),
        (ValueError, "scale must be finite, got nan", {"scale": float("nan")}),
        (ValueError, "scale must be finite, got inf", {"scale": np.float32("inf")}),
        (TypeError, "scale must be one real number, got 'a'", {"scale": "a"}),
        (TypeError, "scale must be one real number", {"scale": [0.5]}),
        (TypeError, "scale must be one real number", {"scale": 1j}),
        (ValueError, "softcap must be 0 or positive, got -1", {"softcap": -1}),
        (ValueError, "softcap must be finite, got nan", {"softcap": float("nan")}),
        (ValueError, "softcap must be finite, got inf", {"softcap": float("inf")}),
        (TypeError, "softcap must be one real number", {"softcap": "1"}),
        (TypeError, "alibi_slopes must be real numbers, got bool", {"alibi_slopes": [True] * 4}),
        (ValueError, r"alibi_slopes must have shape \(4,\) or \(2, 4\), got \(2,\)", {"alibi_slopes": [1.0, 2.0]}),
        (ValueError, "alibi_slopes must be finite, got inf", {"alibi_slopes": [1, 2, 3, np.inf]}),
        (TypeError, "sinks must be real numbers, got complex128", {"sinks": [1j] * 4}),
        (ValueError, r"sinks must have shape \(4,\), got \(\)", {"sinks": 0.0}),
        (ValueError, r"sinks must have shape \(4,\), got \(2, 4\)", {"sinks": np.zeros((2, 4))}),
        (ValueError, "num_threads must be at least 1, got 0", {"num_threads": 0}),
        (ValueError, "num_threads must be at least 1, got -3", {"num_threads": -3}),
        (TypeError, "num_threads must be an integer or None, got 1.5", {"num_threads": 1.5}),
        (TypeError, "num_threads must be an integer or None, got '2'", {"num_threads": "2"}),
    ],
    ids=str,
)
def test_options(error, match, options):
    refused(error, match, **options)


def test_an_unknown_option():
    refused(TypeError, "is_causal", is_causal=True)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "block_table needs kv_lens", {"kv_lens": None}),
        (TypeError, "block_table must be integers, got float64", {"block_table": [[0.0], [1.0]]}),
        (ValueError, r"block_table must have shape \(2, max_pages\), got \(2,\)", {"block_table": [0, 1]}),
        (ValueError, r"block_table must have shape \(2, max_pages\), got \(3, 1\)", {"block_table": [[0], [1], [0]]}),
        (
            ValueError,
            "block_table must fit 64-bit signed integers, got 9223",
            {"block_table": np.uint64([[2**63], [0]])},
        ),
        (ValueError, "block_table must fit 64-bit signed integers, got 9223", {"block_table": [[-1], [2**63]]}),
        (ValueError, "block_table must hold page numbers 0 ... 2, got 3", {"block_table": [[0, 3], [1, 2]]}),
        (ValueError, "block_table must hold page numbers 0 ... 2, got -1", {"block_table": [[0, 1], [-1, 2]]}),
        (ValueError, "kv_lens must lie in 0 ... 8.*got 9", {"kv_lens": [9, 8]}),
        (ValueError, r"k must have shape \(pages, K, page, features\), got \(2, 4, 8\)", {"k": normal(K, 4, D)}),
        (ValueError, r"v must have shape .*got \(2, 2, 4, 8\)", {"v": normal(2, K, 4, D)}),
        (ValueError, r"mask must broadcast .*\(2, 4, 5, 8\), got shape \(4,\)", {"mask": np.ones(4, bool)}),
    ],
    ids=str,
)
def test_pages(error, match, options):
    paged = {"k": normal(3, K, 4, D), "v": normal(3, K, 4, D), "kv_lens": [8, 8], "block_table": [[0, 1], [1, 2]]}
    refused(error, match, **(paged | options))


def test_out():
    shape = (B, H, N, D)
    refused(TypeError, "out must be a NumPy array, got list", out=[])
    refused(TypeError, "out must have dtype float32 .*got", out=np.empty(shape))
    refused(TypeError, "out must have dtype float32 .*got", out=np.empty(shape, np.dtype(np.float32).newbyteorder()))
    refused(ValueError, r"out must have shape \(2, 4, 5, 8\), got \(4, 5, 8\)", out=np.empty(shape[1:], np.float32))
    refused(ValueError, r"out must have shape .*got \(1, 4, 5, 8\)", out=np.empty((1, *shape[1:]), np.float32))
    refused(ValueError, "out must have shape .*got", out=np.empty((B, H, N, D + 1), np.float32))
    read_only = np.empty(shape, np.float32)
    read_only.flags.writeable = False
    refused(ValueError, "out must be writable, got a read-only array", out=read_only)
    for strides in ((4, 4, 4, 4), (0, 160, 32, 4), (640, 160, 28, 4)):
        itself = np.lib.stride_tricks.as_strided(np.zeros(1000, np.float32), shape, strides)
        refused(ValueError, r"out must not overlap itself, got strides \(", out=itself)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias"])
def test_out_over_an_input(name):
    shared = normal(B, H, N, D)
    given = dict(zip("qkv", (shared.copy() for _ in range(3)), strict=True))
    given |= {"mask": normal(B, H, N, N), "bias": normal(B, H, N, N)}
    if name in "qkv":
        given[name] = out = shared
    else:
        buffer = normal(B, H, N, D + N)
        given[name], out = buffer[..., :N], buffer[..., N - 1 : -1]
    before = out.copy()
    with pytest.raises(ValueError, match=f"out must not overlap an input, got memory that {name} uses"):
        attention(**given, out=out)
    assert np.array_equal(out, before)
    if name in "qkv":
        with pytest.raises(ValueError, match="out must not overlap an input"):
            attention(**given, out=shared[:, :, ::-1, ::-1])


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "dropout_p must be 0, got 0.1", {"dropout_p": 0.1}),
        (TypeError, "is_causal must be True or False, got 1", {"is_causal": 1}),
        (TypeError, "enable_gqa must be True or False, got 'no'", {"enable_gqa": "no"}),
        (ValueError, "attn_mask must be None when is_causal", {"attn_mask": np.ones((N, S)), "is_causal": True}),
        (ValueError, "key must have 4 heads, as query has, or enable_gqa=True, got 2 heads", {}),
        (TypeError, "mask must be bool", {"attn_mask": np.ones((N, S), int), "enable_gqa": True}),
        (ValueError, "scale must be finite", {"scale": np.nan, "enable_gqa": True}),
    ],
    ids=str,
)
def test_scaled_dot_product_attention(error, match, options):
    with pytest.raises(error, match=match):
        scaled_dot_product_attention(*qkv(B, H, K, N, S, D), **options)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_scaled_dot_product_attention_names_its_own_arguments(name):
    arrays = dict(zip(("query", "key", "value"), qkv(B, H, H, N, S, D), strict=True))
    arrays[name] = arrays[name].astype(complex)
    with pytest.raises(TypeError, match=f"^{name} must be float32"):
        scaled_dot_product_attention(**arrays)


@pytest.mark.parametrize(
    ("error", "match", "value"),
    [
        (ValueError, "num_threads must be at least 1, got 0", 0),
        (ValueError, "num_threads must be at least 1, got -1", -1),
        (TypeError, "num_threads must be an integer or None, got 2.0", 2.0),
        (TypeError, "num_threads must be an integer or None, got '2'", "2"),
    ],
)
def test_set_num_threads(error, match, value):
    before = fastattn.get_num_threads()
    with pytest.raises(error, match=match):
        fastattn.set_num_threads(value)
    assert fastattn.get_num_threads() == before


def test_show_config_mode():
    with pytest.raises(ValueError, match="mode must be 'stdout' or 'dict', got 'json'"):
        fastattn.show_config(mode="json")


@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_ragged_lists_name_the_argument(name):
    arguments = {key: [[1.0, 2.0]] for key in "qkv"} | {name: [[1.0, 2.0], [3.0]]}
    with pytest.raises(ValueError, match=f"^{name} must be a rectangular array of numbers"):
        fastattn.attention(**arguments)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ("qkvq", {}, "attention() takes 3 positional arguments but 4 were given"),
        ("qk", {}, "attention() missing 1 required positional argument: 'v'"),
        ("", {"k": "k", "v": "v"}, "attention() missing 1 required positional argument: 'q'"),
        ("qkv", {"q": "q"}, "attention() got multiple values for argument 'q'"),
        ("qkv", {"caussal": True}, "attention() got an unexpected keyword argument 'caussal'"),
    ],
)
def test_the_short_way_of_common_calls_takes_arguments_as_any_function_does(arguments, options, says):
    array = np.ones((1, 2, 3, 4), np.float32)
    arrays = [array for _ in arguments]
    named = {name: array if name in "qkv" else value for name, value in options.items()}
    with pytest.raises(TypeError) as caught:
        fastattn.attention(*arrays, **named)
    assert str(caught.value) == says
