"""Every option of `attention` beside every other one, against the oracle.

A problem is built from the names of the options that are on. The first test goes through all pairs, the second lets
hypothesis draw any set, size, dtype and layout.
"""

import inspect
import itertools

import pytest
from checker import assert_attention_close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import DTYPES
from problems import OPTIONS, draw_problem

from fastattn import attention


def check(names, dtypes, **sizes):
    """Call `attention` with the options `names` on and compare with the oracle."""
    q, k, v, options = draw_problem(names, dtypes, **sizes)
    result = attention(q, k, v, **options)
    if "out" in names:
        out = options["out"]
        assert (result[0] if "return_lse" in names else result) is out
        assert (out.base[..., 1::2] == 7).all()
    assert_attention_close(result, q, k, v, **options)


def test_every_option_is_drawn():
    parameters = inspect.signature(attention).parameters.values()
    assert sorted(OPTIONS) == sorted(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(OPTIONS, 2)))
def test_pairs(first, second, dtypes, isa):
    for seed, n_queries in enumerate((1, 5, 37)):  # decoding, less than a tile, several tiles
        check({first, second}, dtypes, seed=seed, n_queries=n_queries)


@pytest.mark.parametrize("dtypes", DTYPES)
# Always the same examples: the bound compares two largest errors of a few numbers each, which chance may exceed.
@settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.sets(st.sampled_from(OPTIONS)),
    lead=st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
    n_kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    n_queries=st.sampled_from([1, 2, 3, 7, 16, 17, 33, 50]),
    n_keys=st.sampled_from([0, 1, 2, 5, 15, 31, 64, 65, 130, 300]),
    head_dim=st.sampled_from([1, 3, 8, 17, 64, 100]),
    value_dim=st.sampled_from([1, 2, 8, 19, 64]),
    seed=st.integers(0, 2**20),
)
def test_any_set_of_options(
    dtypes, names, lead, n_kv_heads, group, n_queries, n_keys, head_dim, value_dim, seed, isa
):  # fmt: skip
    check(names, dtypes, seed=seed, lead=lead, n_kv_heads=n_kv_heads, group=group, n_queries=n_queries, n_keys=n_keys,
          head_dim=head_dim, value_dim=value_dim)  # fmt: skip
