"""The named cases: what is computed, its inputs, and how much work it is.

Legend: B batch, H query heads, K key/value heads, N queries, S keys, D query/key head dim, E value head dim.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUPS = {
    "tiny": "a few queries: what a call costs before it computes anything",
    "short": "encoders on one sentence, one image, one batch",
    "prefill": "every query sees every key",
    "causal": "every query sees the keys up to its own position",
    "decode": "one new query against a long cache: bound by memory",
    "mask": "windows, padded batches, boolean masks",
    "half": "float16 and bfloat16 queries, keys and values",
    "double": "float64",
    "cache": "one new token for each of four sequences in a cache of their own, one query head for each key/value head",
    "scaling": "time against one growing dimension",
}
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
SCALE_BYTES = 4  # of each row of int8
# Largest error accepted before a timing is refused: enough to catch wrong results; accuracy is the test suite's matter.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 4e-2, "bfloat16": 4e-2, "int8": 4e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape with its options. `window` is how many earlier keys a query sees beside its own; None is no limit."""

    name: str
    group: str
    batch: int
    n_heads: int
    n_kv_heads: int
    n_queries: int
    n_keys: int
    head_dim: int
    value_dim: int
    dtype: str = "float32"
    causal: bool = False
    window: int | None = None
    padding: bool = False
    boolmask: bool = False
    page_size: int = 0  # for `cache`: keys of a page, 0 where each entry's keys lie side by side
    linear: bool = False  # `linear_attention`: no softmax
    series: str = ""  # for `scaling`: the curve this case is a point of, and where on its axis
    position: int = 0

    @property
    def square(self) -> bool:
        """True for plain causal self-attention, where start-aligned and end-aligned libraries agree."""
        return self.causal and self.n_queries == self.n_keys and not (self.window or self.padding or self.boolmask)

    @property
    def masked(self) -> bool:
        """True when some query does not see some key."""
        return self.causal or self.window is not None or self.padding or self.boolmask

    @property
    def memory_bound(self) -> bool:
        """True when reading the keys and values costs more than the arithmetic, so that bytes are what counts."""
        return self.n_queries == 1 and not self.linear

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        rows = self.batch * self.n_kv_heads * self.n_keys
        scales = 2 * rows * SCALE_BYTES if self.dtype == "int8" else 0
        return rows * (self.head_dim + self.value_dim) * ITEM_BYTES[self.dtype] + scales

    @property
    def flop(self) -> int:
        """Useful floating-point operations: 2 per multiply-add of the two products, over the pairs a query may see.

        A boolean mask is counted as if it were all True, since its holes are too scattered for anyone to skip. The
        softmax is not counted.
        """
        heads = self.batch * self.n_heads
        if self.linear:
            return 2 * heads * (self.n_keys + self.n_queries) * self.head_dim * self.value_dim
        return 2 * self.n_heads * self._pairs() * (self.head_dim + self.value_dim)

    def _pairs(self) -> int:
        """Visible (query, key) pairs of one head, summed over the batch."""
        last = np.arange(self.n_queries) + self.n_keys - self.n_queries  # each query's own position among the keys
        first = last - self.window if self.window is not None else np.zeros_like(last)
        limited = self.causal or self.window is not None
        end = last + 1 if limited else np.full_like(last, self.n_keys)
        ends = np.minimum(end[None], key_lengths(self)[:, None])  # (B, N)
        return int(np.maximum(ends - np.maximum(first, 0)[None], 0).sum())

    def smoke(self) -> "Case":
        """Return the same case in miniature: seconds for the whole table, every option still in use."""
        ratio = self.n_heads // self.n_kv_heads
        kv_heads = min(self.n_kv_heads, 2)
        n_queries = min(self.n_queries, 9)
        return replace(
            self,
            batch=min(self.batch, 2),
            n_heads=kv_heads * ratio,
            n_kv_heads=kv_heads,
            n_queries=n_queries,
            n_keys=n_queries if self.n_keys == self.n_queries else min(self.n_keys, 33),
            head_dim=min(self.head_dim, 16),
            value_dim=min(self.value_dim, 16),
            window=None if self.window is None else min(self.window, 3),
        )


@dataclass(frozen=True)
class Inputs:
    """The arrays of a case: q (B, H, N, D), k (B, K, S, D), v (B, K, S, E), kv_lens (B,), mask (1, 1, N, S).

    Those of int8 are float32, for the cache to quantize.
    """

    q: NDArray
    k: NDArray
    v: NDArray
    kv_lens: NDArray[np.int64] | None
    mask: NDArray[np.bool_] | None


def case(name: str, group: str, **settings: Any) -> Case:
    """Build a case from the letters of the legend; K, S and E follow H, N and D unless given."""
    letters = {key: settings.pop(key) for key in "BHKNSDE" if key in settings}
    heads, queries, dim = letters["H"], letters["N"], letters["D"]
    return Case(
        name=name,
        group=group,
        batch=letters.get("B", 1),
        n_heads=heads,
        n_kv_heads=letters.get("K", heads),
        n_queries=queries,
        n_keys=letters.get("S", queries),
        head_dim=dim,
        value_dim=letters.get("E", dim),
        **settings,
    )


CASES = (
    case("seed_n2_d4_h2", "tiny", H=2, N=2, D=2),
    case("n10_h4_d16", "tiny", H=4, N=10, D=16),
    case("n32_h8_d32", "tiny", H=8, N=32, D=32),
    case("minilm_n128", "short", H=12, N=128, D=32),
    case("vit_n197", "short", H=12, N=197, D=64),
    case("bert_b8_n128", "short", B=8, H=12, N=128, D=64),
    case("gpt2_n1024", "prefill", H=12, N=1024, D=64),
    case("long_n8192", "prefill", H=2, N=8192, D=64),
    case("cross_n256_s4096_d80", "prefill", H=8, N=256, S=4096, D=80),
    case("gpt2_n1024_causal", "causal", H=12, N=1024, D=64, causal=True),
    case("llama_n2048_causal_gqa", "causal", H=16, K=4, N=2048, D=128, causal=True),
    case("chunk_n256_s4096_causal_gqa", "causal", H=16, K=4, N=256, S=4096, D=128, causal=True),
    case("decode_s16384_gqa4_d128", "decode", H=32, K=8, N=1, S=16384, D=128),
    case("decode_b8_s2048_mha_d64", "decode", B=8, H=16, N=1, S=2048, D=64),
    case("decode_s131072_mqa8_d128", "decode", H=8, K=1, N=1, S=131072, D=128),
    case("window256_n4096", "mask", H=4, N=4096, D=64, window=256),
    case("padding_b8_n512", "mask", B=8, H=12, N=512, D=64, padding=True),
    case("boolmask_n1024", "mask", H=12, N=1024, D=64, boolmask=True),
    case("bf16_gpt2_n1024", "half", H=12, N=1024, D=64, dtype="bfloat16"),
    case("f16_gpt2_n1024", "half", H=12, N=1024, D=64, dtype="float16"),
    case("bf16_decode_s16384_gqa4", "half", H=32, K=8, N=1, S=16384, D=128, dtype="bfloat16"),
    case("f16_decode_s16384_gqa4", "half", H=32, K=8, N=1, S=16384, D=128, dtype="float16"),
    case("f64_n1024", "double", H=6, N=1024, D=64, dtype="float64"),
)

# 268 MB of float32 and 69 MB of int8: more than last-level caches hold.
_CACHE = {"B": 4, "H": 8, "N": 1, "S": 8192, "D": 128}
CACHE_CASES = (
    case("cache_f32", "cache", **_CACHE),
    case("cache_f32_page16", "cache", **_CACHE, page_size=16),
    case("cache_f32_page64", "cache", **_CACHE, page_size=64),
    case("cache_f16", "cache", **_CACHE, dtype="float16"),
    case("cache_f16_page16", "cache", **_CACHE, dtype="float16", page_size=16),
    case("cache_f16_page64", "cache", **_CACHE, dtype="float16", page_size=64),
    case("cache_bf16", "cache", **_CACHE, dtype="bfloat16"),
    case("cache_int8", "cache", **_CACHE, dtype="int8"),
    case("cache_int8_page16", "cache", **_CACHE, dtype="int8", page_size=16),
    case("cache_int8_page64", "cache", **_CACHE, dtype="int8", page_size=64),
)


def _series(name: str, positions: Iterable[int], letters: str, **settings: Any) -> tuple[Case, ...]:
    """Cases that differ in one number, given to every dimension in `letters`."""
    return tuple(
        case(f"{name}_{n}", "scaling", series=name, position=n, **settings, **dict.fromkeys(letters, n))
        for n in positions
    )


def _powers(first: int, last: int, factor: int = 2) -> list[int]:
    values = [first]
    while values[-1] * factor <= last:
        values.append(values[-1] * factor)
    return values


# name of the curve -> label of its axis
SERIES = {
    "full_n": "queries and keys N (H 2, D 64)",
    "window256_n": "queries and keys N, window 256 (H 2, D 64)",
    "linear_n": "queries and keys N, linear attention (H 2, D 64)",
    "decode_s": "keys S, one query (H 8, K 1, D 128)",
    "batch_b": "batch B (H 12, N 128, D 64)",
    "heads_h": "heads H (N 256, D 64)",
}
SCALING_CASES = (
    *_series("full_n", _powers(16, 8192), "N", H=2, D=64),
    *_series("window256_n", _powers(512, 131072, 4), "N", H=2, D=64, window=256),
    *_series("linear_n", _powers(512, 131072, 4), "N", H=2, D=64, linear=True),
    *_series("decode_s", _powers(512, 131072, 4), "S", H=8, K=1, N=1, D=128),
    *_series("batch_b", _powers(1, 32), "B", H=12, N=128, D=64),
    *_series("heads_h", _powers(1, 32), "HK", N=256, D=64),
)


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of that name; bfloat16 comes from `ml_dtypes`."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def key_lengths(case: Case) -> NDArray[np.int64]:
    """Valid keys of each batch entry (B,): from a quarter to all of them when padded, else all."""
    if not case.padding:
        return np.full(case.batch, case.n_keys, dtype=np.int64)
    return (np.linspace(0.25, 1.0, case.batch) * case.n_keys).astype(np.int64)


def make_inputs(case: Case) -> Inputs:
    """Draw the arrays of a case: standard normal, always the same."""
    random = np.random.default_rng(1)
    dtype = numpy_dtype("float32" if case.dtype == "int8" else case.dtype)

    def draw(heads: int, length: int, dim: int) -> NDArray:
        values = random.standard_normal((case.batch, heads, length, dim), dtype=np.float32)
        return values.astype(dtype, copy=False)

    q = draw(case.n_heads, case.n_queries, case.head_dim)
    k = draw(case.n_kv_heads, case.n_keys, case.head_dim)
    v = draw(case.n_kv_heads, case.n_keys, case.value_dim)
    mask = None
    if case.boolmask:
        mask = random.random((1, 1, case.n_queries, case.n_keys)) < 0.7
        mask[..., 0] = True  # libraries disagree about a query that sees nothing; no row here is one
    return Inputs(q, k, v, key_lengths(case) if case.padding else None, mask)


def visible(case: Case, inputs: Inputs, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which keys the queries `rows` may see: (B or 1, 1, len(rows), S)."""
    own = (rows + case.n_keys - case.n_queries)[:, None]
    key = np.arange(case.n_keys)[None]
    seen = np.ones((1, 1, len(rows), case.n_keys), dtype=np.bool_)
    if case.causal or case.window is not None:
        seen &= key <= own
    if case.window is not None:
        seen &= key >= own - case.window
    if inputs.kv_lens is not None:
        seen = seen & (key < inputs.kv_lens[:, None, None, None])
    if inputs.mask is not None:
        seen = seen & inputs.mask[..., rows, :]
    return seen
