"""However an array lies in memory, the result is the same: strides, byte order, alignment, files, `out`."""

import numpy as np
import pytest
from checker import assert_attention_close
from inputs import BFLOAT16, DTYPES, normal, qkv

from fastattn import attention
from fastattn._quantized import quantize_rows, quantized_attention

pytestmark = pytest.mark.usefixtures("isa")


def _with_gaps(x):
    large = np.full((x.shape[0], x.shape[1], 3 * x.shape[2], x.shape[3] + 5), 9, x.dtype)
    large[:, :, ::3, 2:-3] = x
    return large[:, :, ::3, 2:-3]


def _every_other_feature(x):
    large = np.full((*x.shape[:-1], 2 * x.shape[-1]), 9, x.dtype)
    large[..., ::2] = x
    return large[..., ::2]


def _misaligned(x, offset=1):
    memory = np.zeros(x.nbytes + offset, np.uint8)
    memory[offset:] = np.frombuffer(x.tobytes(), np.uint8)
    return np.frombuffer(memory.data, np.uint8, offset=offset).view(x.dtype).reshape(x.shape)


def _misaligned_rows(x):
    """Aligned data, but rows an odd number of bytes apart."""
    row_bytes = x.shape[-1] * x.itemsize + 1
    memory = np.zeros((*x.shape[:-1], row_bytes), np.uint8)
    memory[..., :-1] = np.ascontiguousarray(x).view(np.uint8)
    view = np.ndarray(x.shape, x.dtype, memory, strides=(*memory.strides[:-1], x.itemsize))
    assert np.array_equal(view, x)
    return view


def _odd_strides(x):
    """Strides that no element is reached by, of axes of one element, in an array that is not contiguous."""
    x = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)  # NumPy gives contiguous ones their usual strides
    strides = [stride if size > 1 else 7 for stride, size in zip(x.strides, x.shape, strict=True)]
    return np.lib.stride_tricks.as_strided(x, x.shape, strides)


def _read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


# (B, H, L, D) arrays of the same numbers, laid out differently.
LAYOUTS = {
    "Fortran order": np.asfortranarray,
    "rows before heads": lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "features before rows": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "reversed features": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "reversed rows": lambda x: np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1],
    "reversed heads": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "every other feature": _every_other_feature,
    "every third row": _with_gaps,
    "misaligned": _misaligned,
    "misaligned rows": _misaligned_rows,
    "read-only": _read_only,
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES)


@every_dtype
@every_layout
def test_layout_of_each_input(layout, dtypes):
    arrays = qkv(2, 3, 3, 9, 21, 10, dtypes=dtypes)
    for place in range(3):
        changed = list(arrays)
        changed[place] = LAYOUTS[layout](arrays[place])
        assert_attention_close(attention(*changed, causal=True), *arrays, causal=True)
    changed = [LAYOUTS[layout](array) for array in arrays]
    assert_attention_close(attention(*changed), *arrays)


@every_layout
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bool"])
def test_layout_of_masks_and_biases(layout, dtype):
    q, k, v = qkv(2, 3, 3, 9, 21, 10)
    numbers = normal(2, 3, 9, 21, seed=5)
    mask = numbers > 0 if dtype == "bool" else numbers.astype(dtype)
    assert_attention_close(attention(q, k, v, mask=LAYOUTS[layout](mask)), q, k, v, mask=mask)
    if dtype != "bool":
        assert_attention_close(attention(q, k, v, bias=LAYOUTS[layout](mask)), q, k, v, bias=mask)


@every_dtype
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "read-only"])
def test_layout_of_out(layout, dtypes):
    q, k, v = qkv(2, 3, 3, 9, 21, 10, dtypes=dtypes)
    surroundings = LAYOUTS[layout](np.full(q.shape, 7, q.dtype))
    base = surroundings
    while isinstance(base.base, np.ndarray):
        base = base.base
    untouched = base.copy()
    result = attention(q, k, v, out=surroundings)
    assert result is surroundings
    assert_attention_close(result, q, k, v)
    # Whatever of the surrounding array is no part of out keeps its bytes.
    result[...] = 7
    assert base.tobytes() == untouched.tobytes()


@pytest.mark.parametrize("ndim", [2, 3])
def test_out_without_batch_or_heads(ndim):
    q, k, v = (x[0] if ndim == 3 else x[0, 0] for x in qkv(1, 2, 2, 5, 9, 8))
    out = np.empty((*q.shape[:-1], 2 * q.shape[-1]), np.float32)[..., ::2]
    assert attention(q, k, v, out=out) is out
    assert_attention_close(out, q, k, v)


def test_out_on_leading_axes_that_do_not_collapse():
    q, k, v = (x.reshape(2, 3, *x.shape[1:]) for x in qkv(6, 4, 2, 5, 9, 8))
    out = np.empty((3, 5, 2, 4, 8), np.float32).transpose(2, 0, 3, 1, 4)
    assert attention(q, k, v, out=out) is out
    assert_attention_close(out, q, k, v)


def test_one_result_next_to_another():
    """out may share a buffer with an input as long as no element is shared."""
    buffer = np.zeros((2, 9, 4, 16), np.float32)
    q, out = buffer[..., :8], buffer[..., 8:]
    q[...] = normal(2, 9, 4, 8)
    k, v = normal(2, 9, 6, 8, seed=1), normal(2, 9, 6, 8, seed=2)
    assert_attention_close(attention(q, k, v, out=out), q, k, v)


@every_dtype
def test_overlapping_windows(dtypes):
    """Rows that share memory: the last 6 of each 8 numbers are the first 6 of the next row."""
    q_dtype, kv_dtype = DTYPES[dtypes]

    def windows(n, dtype, seed):
        return np.lib.stride_tricks.sliding_window_view(normal(2 * n + 6, dtype=dtype, seed=seed), 8)[::2]

    q, k, v = windows(5, q_dtype, 0), windows(20, kv_dtype, 1), windows(20, kv_dtype, 2)
    assert_attention_close(attention(q, k, v), q, k, v)


@every_dtype
@pytest.mark.parametrize("repeated", ["rows", "features", "heads"])
def test_broadcast_views(dtypes, repeated):
    q, k, v = qkv(2, 3, 3, 5, 21, 10, dtypes=dtypes)
    axis = {"heads": 1, "rows": 2, "features": 3}[repeated]
    q, k, v = (np.broadcast_to(x.take([0], axis), x.shape) for x in (q, k, v))
    assert_attention_close(attention(q, k, v), q, k, v)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16])
def test_memory_mapped(tmp_path, dtype):
    arrays = [normal(2, 2, 7, 8, dtype=dtype, seed=seed) for seed in range(3)]
    mapped = []
    for i, array in enumerate(arrays):
        path = tmp_path / f"{i}.bin"
        path.write_bytes(b"\0" * 3 + array.tobytes())  # an odd offset, as behind a header
        mapped.append(np.memmap(path, np.uint8, "r", offset=3).view(np.ndarray).view(array.dtype).reshape(array.shape))
    assert_attention_close(attention(*mapped), *arrays)


def test_numpy_memmap_gives_a_plain_array(tmp_path):
    q, k, v = qkv(1, 2, 2)
    mapped = np.memmap(tmp_path / "q.bin", np.float32, "w+", shape=q.shape)
    mapped[...] = q
    result = attention(mapped, k, v)
    assert type(result) is np.ndarray
    assert_attention_close(result, q, k, v)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("place", ["q", "k", "v", "mask", "bias", "sinks", "alibi_slopes"])
def test_byte_swapped(dtype, place):
    arguments = dict(zip("qkv", (normal(1, 2, 5, 8, dtype=dtype, seed=seed) for seed in range(3)), strict=True))
    arguments |= {"mask": normal(5, 5, dtype=dtype, seed=3), "bias": normal(2, 5, 5, dtype=dtype, seed=4)}
    arguments |= {"sinks": normal(2, dtype=dtype, seed=5), "alibi_slopes": normal(2, dtype=dtype, seed=6)}
    native = dict(arguments)
    arguments[place] = arguments[place].astype(arguments[place].dtype.newbyteorder())
    result = attention(**arguments)
    assert result.dtype.isnative
    q, k, v = (native.pop(name) for name in "qkv")
    assert_attention_close(result, q, k, v, **native)


def test_byte_swapped_integers():
    q, k, v = qkv()
    swapped = np.dtype(np.int64).newbyteorder()
    options = {"kv_lens": [30, 12], "q_offset": [20, 3]}
    result = attention(q, k, v, causal=True, **{name: np.array(value, swapped) for name, value in options.items()})
    assert_attention_close(result, q, k, v, causal=True, **options)
    pages, table = qkv(4, 2, 2, keys=5), np.array([[3, 1], [0, 2]])
    result = attention(q[:, :2], *pages[1:], block_table=table.astype(swapped), kv_lens=[10, 7])
    assert_attention_close(result, q[:, :2], *pages[1:], block_table=table, kv_lens=[10, 7])


def test_subclasses_become_plain_arrays():
    q, k, v = (x[0, 0] for x in qkv())
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.asmatrix(q)
    result = attention(matrix, k, v)
    assert type(result) is np.ndarray
    assert_attention_close(result, q, k, v)


@pytest.mark.parametrize("dtypes", [*DTYPES, "float32-float16"])
@pytest.mark.parametrize("sizes", [(1, 2, 2, 3, 70, 1, 1), (2, 2, 2, 3, 1, 4, 1), (1, 4, 4, 1, 300, 1, 2)])
def test_strides_of_axes_of_one_element(dtypes, sizes):
    arrays = qkv(*sizes, dtypes=dtypes)
    mask = normal(*arrays[0].shape[:-1], sizes[4]) > -1
    expected = attention(*arrays, mask=mask)
    assert np.array_equal(attention(*map(_odd_strides, arrays), mask=_odd_strides(mask)), expected)


def test_strides_of_axes_of_one_code():
    q, k, v = qkv(1, 8, 8, 1, 300, 1, 1)
    parts = *quantize_rows(k), *quantize_rows(v)
    expected = quantized_attention(q, *parts)
    assert np.array_equal(quantized_attention(q, *map(_odd_strides, parts)), expected)


def test_result_is_contiguous():
    q, k, v = (LAYOUTS["rows before heads"](x) for x in qkv())
    out, lse = attention(q, k, v, return_lse=True)
    assert out.flags.c_contiguous
    assert lse.flags.c_contiguous
