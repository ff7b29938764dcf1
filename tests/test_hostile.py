"""What a call may touch: memory with forbidden pages around it, garbage where nothing may look, odd sizes.

A read or write outside an array ends the process here, because the pages beside it may not be touched.
"""

import ctypes
import io
import mmap
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from checker import assert_attention_close
from inputs import BFLOAT16, DTYPES, normal

from fastattn import attention, attention_varlen, linear_attention, multi_head_attention
from fastattn._text import TextProblemError, parse_problem

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
every_dtype = pytest.mark.parametrize("dtypes", DTYPES)
every_side = pytest.mark.parametrize("fence", [True, False], indirect=True, ids=["end of a page", "start of a page"])

# Around whole vectors, tiles, blocks of keys and chunks; one row, few rows (decoding), and panels of rows.
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 15, 16, 17, 24, 31, 32, 33, 47, 63, 64, 65, 70]
KEYS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65, 127, 128, 129, 255, 256, 257]
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33]


class Fence:
    """Copies of arrays in pages of their own, between two pages that may not be touched."""

    def __init__(self, at_end):
        self.at_end = at_end
        self._kept = []
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def put(self, array, *, writable=False, hide_bytes_after=None):
        """Return the copy. `hide_bytes_after` forbids whole pages of the array itself from that byte on."""
        array = np.ascontiguousarray(array)
        page = mmap.PAGESIZE
        inner = max(1, -(-array.nbytes // page)) * page
        memory = mmap.mmap(-1, inner + 2 * page)
        start = page + (inner - array.nbytes if self.at_end else 0)
        copy = np.frombuffer(memory, np.uint8, array.nbytes, start).view(array.dtype).reshape(array.shape)
        copy[...] = array
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._set(base, page, 0)
        self._set(base + page + inner, page, 0)
        if not writable:
            self._set(base + page, inner, 1)
            copy.flags.writeable = False
        if hide_bytes_after is not None:
            first = -(-(start + hide_bytes_after) // page) * page
            self._set(base + first, page + inner - first, 0)
        self._kept.append((memory, base, inner + 2 * page))
        return copy

    def _set(self, address, size, protection):
        assert self._protect(address, size, protection) == 0, ctypes.get_errno()

    def open(self):
        """Allow everything again, for whoever frees or prints the arrays."""
        for _, base, size in self._kept:
            self._set(base, size, 3)


@pytest.fixture
def fence(request):
    made = Fence(getattr(request, "param", False))
    yield made
    made.open()


def sizes(seed, count):
    """Seeded (rows, keys, D, E, key/value heads, heads per key/value head)."""
    rng = np.random.default_rng(seed)
    pick = rng.choice
    return [tuple(int(pick(x)) for x in (ROWS, KEYS, SIZES, SIZES, [1, 2], [1, 1, 2, 3, 5])) for _ in range(count)]


def arrays(n_queries, n_keys, dim, value_dim, kv_heads, group, dtypes, seed=0):
    q_dtype, kv_dtype = DTYPES[dtypes]
    return (
        normal(kv_heads * group, n_queries, dim, dtype=q_dtype, seed=seed),
        normal(kv_heads, n_keys, dim, dtype=kv_dtype, seed=seed + 1),
        normal(kv_heads, n_keys, value_dim, dtype=kv_dtype, seed=seed + 2),
    )


def agree(actual, expected):
    """Nearly equal: the layout of an array may decide where a key block ends, and with it the last bits."""
    coarse = expected.dtype.itemsize == 2
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_allclose(a, b, rtol=2e-2 if coarse else 2e-5, atol=2e-2 if coarse else 1e-5)


def layouts(x, fence, turn):
    """The same numbers fenced in: in order, in Fortran order, backwards, with the features apart."""
    if turn % 4 == 1:
        return fence.put(x.transpose()).transpose()
    if turn % 4 == 2:
        backwards = (slice(None, None, -1),) * x.ndim
        return fence.put(x[backwards])[backwards]
    if turn % 4 == 3:
        return fence.put(np.stack([x, np.zeros_like(x)], axis=-1))[..., 0]
    return fence.put(x)


@linux_only
@every_dtype
@every_side
def test_nothing_beside_the_arrays_is_touched(isa, fence, dtypes):
    for turn, shape in enumerate(sizes(1, 60)):
        q, k, v = arrays(*shape, dtypes)
        fenced = [layouts(x, fence, turn + place * (turn // 4)) for place, x in enumerate((q, k, v))]
        out = fence.put(np.full((*q.shape[:-1], v.shape[-1]), 7, q.dtype), writable=True)
        if turn % 3 == 0:
            out = out[::-1, ::-1, ::-1]
        options = {"causal": turn % 2 == 0}
        assert attention(*fenced, out=out, return_lse=turn % 5 == 0, **options) is not None
        agree(out, attention(q, k, v, **options))


@linux_only
@pytest.mark.parametrize("dtypes", ["float32", "float64", "bfloat16"])
@every_side
@pytest.mark.parametrize("dtype", ["bool", "float16", "bfloat16", "float32", "float64"])
def test_nothing_beside_masks_and_options_is_touched(isa, fence, dtypes, dtype):
    rng = np.random.default_rng(3)
    for turn, shape in enumerate(sizes(2, 24)):
        q, k, v = arrays(*shape, dtypes)
        axes = [n if (turn >> axis) & 1 else 1 for axis, n in enumerate((q.shape[0], q.shape[1], k.shape[1]))]
        mask = rng.random(axes) < 0.7
        if dtype != "bool":
            mask = np.where(mask, rng.standard_normal(axes), -np.inf).astype(np.dtype(dtype))
        bias = rng.standard_normal(axes[::-1][:1]) if axes[2] > 1 else rng.standard_normal(axes)
        options = {"mask": mask, "bias": bias, "alibi_slopes": rng.random(len(q)), "sinks": rng.random(len(q))}
        fenced = {name: layouts(x, fence, turn) for name, x in options.items()}
        agree(attention(*map(fence.put, (q, k, v)), **fenced), attention(q, k, v, **options))


@linux_only
@every_dtype
@every_side
@pytest.mark.parametrize("page", [1, 2, 5, 16, 33])
def test_nothing_beside_pages_is_touched(isa, fence, dtypes, page):
    rng = np.random.default_rng(page)
    for n_queries, n_keys, dim, value_dim, kv_heads, group in sizes(4, 12):
        n_pages = -(-n_keys // page)
        q = normal(2, kv_heads * group, n_queries, dim, dtype=DTYPES[dtypes][0])
        k = normal(2 * n_pages, kv_heads, page, dim, dtype=DTYPES[dtypes][1])
        v = normal(2 * n_pages, kv_heads, page, value_dim, dtype=DTYPES[dtypes][1])
        lengths = rng.integers(0, n_keys + 1, 2)
        table = rng.permutation(2 * n_pages).reshape(2, n_pages)
        table[np.arange(n_pages) * page >= lengths[:, None]] = np.iinfo(np.int64).min  # never looked at
        fenced = attention(*map(fence.put, (q, k, v)), block_table=fence.put(table), kv_lens=fence.put(lengths))
        assert_attention_close(fenced, q, k, v, block_table=table, kv_lens=lengths)


@linux_only
@every_dtype
@every_side
def test_nothing_beside_packed_members_is_touched(isa, fence, dtypes):
    rng = np.random.default_rng(5)
    for n_queries, n_keys, dim, value_dim, kv_heads, group in sizes(6, 20):
        q, k, v = (x.swapaxes(0, 1) for x in arrays(n_queries, n_keys, dim, value_dim, kv_heads, group, dtypes))
        bounds = [np.sort(np.r_[0, rng.integers(0, n + 1, 3), n]) for n in (n_queries, n_keys)]
        fenced = attention_varlen(*map(fence.put, (q, k, v)), *map(fence.put, bounds), causal=True, num_threads=2)
        agree(fenced, attention_varlen(q, k, v, *bounds, causal=True))


@linux_only
@every_dtype
@pytest.mark.parametrize("n_queries", [1, 3, 40])
@pytest.mark.parametrize("rule", ["kv_lens", "window", "block_table"])
def test_keys_that_nobody_sees_are_never_read(isa, fence, dtypes, n_queries, rule):
    """Their pages may not be touched at all."""
    q, k, v = arrays(n_queries, 5000, 16, 16, 1, 1, dtypes)
    seen = 97
    row_bytes = k.shape[-1] * k.itemsize
    if rule == "block_table":
        k, v = (x.reshape(-1, 1, 10, 16) for x in (k, v))
        options = {"block_table": np.arange(10), "kv_lens": seen}
    elif rule == "kv_lens":
        options = {"kv_lens": seen}
    else:
        options = {"window": (None, 0), "q_offset": seen - n_queries}
    fenced = [fence.put(x, hide_bytes_after=(seen + 3) * row_bytes) for x in (k, v)]
    agree(attention(q, *fenced, **options), attention(q, k, v, **options))


def garbage(dtype):
    """NaN of several payloads, and infinities."""
    if dtype == np.float32:
        return np.array([0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000], np.uint32).view(dtype)
    return np.array([np.nan, -np.nan, np.inf, -np.inf]).astype(dtype)


RULES = {
    "bool mask": lambda keep, rng: {"mask": keep},
    "float mask": lambda keep, rng: {"mask": np.where(keep, rng.standard_normal(keep.shape), -np.inf)},
    "bfloat16 bias": lambda keep, rng: {"bias": np.where(keep, 0.5, -np.inf).astype(BFLOAT16)},
    "mask, bias, slopes": lambda keep, rng: {
        "mask": keep,
        "bias": np.where(keep, 1, np.nan).astype(np.float32),
        "alibi_slopes": np.ones(keep.shape[0]),
    },
    "mask, softcap, sinks": lambda keep, rng: {"mask": keep, "softcap": 2.0, "sinks": np.zeros(keep.shape[0])},
}


@every_dtype
@pytest.mark.parametrize("rule", RULES)
def test_garbage_at_excluded_keys_changes_nothing(isa, dtypes, rule):
    rng = np.random.default_rng(7)
    for n_queries, n_keys, dim, value_dim, kv_heads, group in sizes(8, 40):
        q, k, v = arrays(n_queries, n_keys, dim, value_dim, kv_heads, group, dtypes)
        hidden = rng.random(n_keys) < rng.choice([0.02, 0.5, 0.98])
        keep = (rng.random((len(q), n_queries, n_keys)) < 0.8) & ~hidden
        options = RULES[rule](keep, rng) | {"return_lse": True, "causal": bool(rng.integers(2))}
        clean = attention(q, k, v, **options)
        for x in (k, v):
            x[:, hidden] = rng.choice(garbage(x.dtype), x[:, hidden].shape)
        spoilt = attention(q, k, v, **options)
        assert np.array_equal(spoilt[1], clean[1])
        assert np.array_equal(spoilt[0].astype(np.float64), clean[0].astype(np.float64))


@pytest.mark.parametrize("dtypes", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("n_queries", [1, 3, 9, 40])
def test_garbage_stays_in_the_rows_that_see_it(isa, dtypes, n_queries):
    for n_keys in (9, 33, 257, 1025):
        q, k, v = arrays(n_queries, n_keys, 9, 5, 1, 1, dtypes)
        keep = np.random.default_rng(n_keys).random((n_queries, n_keys)) < 0.5
        clean = attention(q, k, v, mask=keep)
        for key in (0, n_keys // 2, n_keys - 1):
            for nan in garbage(k.dtype)[:2]:
                for x in (k, v):
                    spoilt = x.copy()
                    spoilt[0, key, 2] = nan
                    result = attention(q, *((spoilt, v) if x is k else (k, spoilt)), mask=keep)
                    columns = np.arange(5) == 2 if x is v else np.ones(5, bool)
                    assert np.array_equal(np.isnan(result[0]), keep[:, key, None] & columns)
                    agree(result[~np.isnan(result)], clean[~np.isnan(result)])


def test_numbers_changed_by_another_thread_do_no_harm(isa):
    """The numbers that come out are anybody's; the process lives, and the next call is right."""
    q, k, v = arrays(40, 500, 16, 16, 2, 2, "float32")
    expected = attention(q, k, v, mask=np.ones((40, 500), bool), num_threads=2)
    changing = [x.copy() for x in (q, k, v)] + [np.ones((40, 500), bool)]
    done = threading.Event()

    def change():
        while not done.is_set():
            for x in changing:
                x.view(np.uint8)[...] = (
                    np.random.default_rng().integers(0, 256, x.nbytes, np.uint8).reshape(x.view(np.uint8).shape)
                )

    other = threading.Thread(target=change)
    other.start()
    for _ in range(50):
        assert attention(*changing[:3], mask=changing[3], num_threads=2).shape == expected.shape
    done.set()
    other.join()
    assert np.array_equal(attention(q, k, v, mask=np.ones((40, 500), bool), num_threads=2), expected)


ODD_ARRAYS = {
    "object": np.array([[1, 2], [3, 4]], object),
    "huge integers": [[2**70, 1]],
    "complex": np.ones((2, 2), complex),
    "extended": np.ones((2, 2), np.longdouble),
    "time": np.zeros((2, 2), "M8[s]"),
    "record": np.zeros((2, 2), [("a", "f4")]),
    "text": np.array([["1", "2"]]),
    "masked": np.ma.ones((2, 2)),
    "float8": np.ones((2, 2), ml_dtypes.float8_e4m3fn),
    "none": None,
}


@pytest.mark.parametrize("kind", [kind for kind in ODD_ARRAYS if kind != "extended" or np.longdouble(0).itemsize > 8])
def test_arrays_that_are_not_numbers_are_refused_by_name(kind):
    good, odd = np.ones((2, 2)), ODD_ARRAYS[kind]
    for place, name in enumerate("qkv"):
        given = [good, good, good]
        given[place] = odd
        for function in (attention, linear_attention, lambda *x: multi_head_attention(*x, 1)):
            with pytest.raises(TypeError, match=rf"^{name} "):
                function(*given)
    if kind not in ("none", "extended"):
        with pytest.raises(TypeError, match=r"^mask "):
            attention(good, good, good, mask=odd)


def test_a_damaged_text_is_refused_or_read_as_numbers():
    """Whatever a byte becomes, parsing ends in a problem of finite numbers or in a message that names a line."""
    rng = np.random.default_rng(9)
    good = b"2 4 2\n1 0 0 1\n0 1 1 0\n\n1 0 -.5 1e0\n0 1 1 0\n1 2 3 4\n5 6 7 8.25\n"
    outcomes = set()
    for _ in range(3000):
        text = bytearray(good)
        at = int(rng.integers(len(text)))
        how = int(rng.integers(3))
        if how == 0:
            text[at] = int(rng.integers(256))
        elif how == 1:
            del text[at]
        else:
            text.insert(at, b"-+.eE_n 0x\0\x85\xa0\x1c"[int(rng.integers(14))])
        try:
            problem = parse_problem(io.BytesIO(bytes(text)))
        except TextProblemError as error:
            assert str(error).startswith("line ")  # noqa: PT017
            outcomes.add("refused")
        else:
            assert all(np.isfinite(x).all() and x.shape == problem.q.shape for x in problem[:3])
            outcomes.add("read")
    assert outcomes == {"refused", "read"}


def test_extreme_options_stay_exact(isa):
    """Values beyond float32, sinks without keys, slopes whose product overflows, scales whose unit would."""
    ones, v = np.ones((3, 4), np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
    mean = np.broadcast_to(v.mean(0), (1, 4))
    assert np.array_equal(attention(ones, ones, v, mask=np.eye(3, dtype=bool), alibi_slopes=[-3e38]), v)
    np.testing.assert_allclose(attention(ones[:1], ones, v, alibi_slopes=[3e38], q_offset=100), mean)
    np.testing.assert_allclose(attention(ones[:1], ones, v, softcap=1e39), mean)
    out, lse = attention(ones[:1], ones, v, sinks=[np.inf], mask=np.zeros(3, bool), return_lse=True)
    assert (out == 0).all()
    assert (lse == np.inf).all()
    tiny, keys, one_hot = np.full((1, 1), 1e-300), np.array([[1.0], [2.0]]), np.array([[0.0], [1.0]])
    np.testing.assert_allclose(attention(tiny, keys, one_hot, scale=1e300), 1 / (1 + np.exp(-1)))
    endless = np.broadcast_to(np.float32(1), (1, 1, 1, 2**59))
    with pytest.raises(MemoryError, match="no memory for scratch"):
        attention(endless, endless, np.ones((1, 1, 1, 1), np.float32))
