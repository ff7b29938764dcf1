"""Random problems for `attention`: any options, sizes, dtypes and layouts, from one seed."""

import ml_dtypes
import numpy as np
from inputs import DTYPES

PAGE = 3


def draw_mask(random, shape, kind):
    """Return a mask or bias that broadcasts to `shape` along some axes and has strides of its own."""
    shape = tuple(1 if random.random() < 0.3 else size for size in shape)[random.integers(0, len(shape)) :]
    keep = random.random(shape) < 0.8
    if kind is bool:
        return np.asarray(keep)[..., ::-1]
    return np.where(keep, 3 * random.standard_normal(shape), -np.inf).astype(kind).T.copy().T


def draw_sides(random, n_keys):
    return tuple(int(random.integers(-1, n_keys + 2)) for _ in range(2))


# Each draws a value for its option from a random generator and the problem (lead, heads, queries, keys).
DRAW = {
    "mask": lambda random, lead, h, n, s: draw_mask(
        random, (*lead, h, n, s), (bool, np.float32, np.float64, np.float16)[random.integers(4)]
    ),
    "bias": lambda random, lead, h, n, s: draw_mask(
        random, (*lead, h, n, s), (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)[random.integers(4)]
    ),
    "causal": lambda random, lead, h, n, s: True,
    "window": lambda random, lead, h, n, s: draw_sides(random, s),
    "q_offset": lambda random, lead, h, n, s: random.integers(-n, s + 2, lead),
    "kv_lens": lambda random, lead, h, n, s: random.integers(0, s + 1, lead),
    "scale": lambda random, lead, h, n, s: float(random.choice([0.0, -0.1, 0.125, 0.2])),
    "softcap": lambda random, lead, h, n, s: float(random.choice([0.5, 2.0, 30.0])),
    "alibi_slopes": lambda random, lead, h, n, s: random.random((h,) if random.random() < 0.5 else (*lead, h)),
    "sinks": lambda random, lead, h, n, s: np.where(random.random(h) < 0.2, -np.inf, 2 * random.standard_normal(h)),
    "num_threads": lambda random, lead, h, n, s: int(random.integers(1, 5)),
    "return_lse": lambda random, lead, h, n, s: True,
    "progress": lambda random, lead, h, n, s: lambda done: None,
}
OPTIONS = [*DRAW, "block_table", "out"]


def rows(random, lead, n_heads, n_rows, dim, dtype):
    """Return (*lead, heads, rows, dim) in one of several memory layouts."""
    array = random.standard_normal((*lead, n_heads, n_rows, dim)).astype(dtype)
    order = random.integers(4)
    if order == 1:
        return array.swapaxes(-3, -2).copy().swapaxes(-3, -2)
    if order == 2:
        return np.repeat(array, 2, axis=-1)[..., ::2]
    return np.asfortranarray(array) if order == 3 else array


def paged(random, lead, keys, values):
    """Return the same keys and values as pages in random order, and the table that finds them."""
    n_pages = keys.shape[-2] // PAGE
    table = random.permutation(int(np.prod(lead)) * n_pages).reshape(*lead, n_pages)
    pools = []
    for array in (keys, values):
        pages = array.reshape(*array.shape[:-2], n_pages, PAGE, array.shape[-1])  # (*lead, K, pages, page, dim)
        pages = np.moveaxis(pages, -3, -4).reshape(-1, array.shape[-3], PAGE, array.shape[-1])
        pool = np.empty_like(pages)
        pool[table.ravel()] = pages
        pools.append(pool)
    return *pools, table


def draw_problem(
    names, dtypes, *, seed, lead=(2,), n_kv_heads=2, group=2, n_queries=5, n_keys=36, head_dim=9, value_dim=7
):
    """Return q, k, v and the options `names` of a call of `attention`."""
    random = np.random.default_rng(seed)
    n_heads = n_kv_heads * group
    if "block_table" in names:
        n_keys += -n_keys % PAGE
        names = {*names, "kv_lens"}
    q_dtype, kv_dtype = DTYPES[dtypes]
    q = rows(random, lead, n_heads, n_queries, head_dim, q_dtype)
    k, v = (rows(random, lead, n_kv_heads, n_keys, dim, kv_dtype) for dim in (head_dim, value_dim))
    options = {n: DRAW[n](random, lead, n_heads, n_queries, n_keys) for n in OPTIONS if n in names and n in DRAW}
    if "block_table" in names:
        k, v, options["block_table"] = paged(random, lead, k, v)
    if "out" in names:
        options["out"] = np.full((n_queries, *lead, n_heads, 2 * value_dim), 7, q_dtype)[..., ::2]
        options["out"] = np.moveaxis(options["out"], 0, -2)
    return q, k, v, options
