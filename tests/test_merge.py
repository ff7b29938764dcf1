"""Merging attention over disjoint key sets: the law, empty states, non-finite data, inputs and errors."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn import merge_states, reference

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
TOLERANCE = {np.float32: 2e-6, np.float64: 4e-15, np.float16: 2e-3, ml_dtypes.bfloat16: 2e-2}


def lse_dtype(dtype):
    return np.float64 if dtype is np.float64 else np.float32


def random_states(n_states, shape, dtype=np.float32, seed=0):
    """Return stacked outs (states, ..., N, E) and lses (states, ..., N)."""
    random = np.random.default_rng(seed)
    outs = random.standard_normal((n_states, *shape)).astype(dtype)
    lses = (5 * random.standard_normal((n_states, *shape[:-1]))).astype(lse_dtype(dtype))
    return outs, lses


def assert_merged(outs, lses, dtype=np.float32):
    """Compare with the oracle and return the result."""
    out, lse = merge_states(outs, lses)
    expected_out, expected_lse = reference.merge_states(list(outs), list(lses))
    assert out.dtype == np.dtype(dtype)
    assert lse.dtype == lse_dtype(dtype)
    assert out.flags.c_contiguous
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(out.astype(np.float64), expected_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=TOLERANCE[lse_dtype(dtype)], atol=TOLERANCE[lse_dtype(dtype)])
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(
    n_states=st.integers(1, 5),
    shape=st.lists(st.integers(0, 4), min_size=2, max_size=4).map(tuple),
    empty=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_against_oracle(dtype, n_states, shape, empty, seed):
    outs, lses = random_states(n_states, shape, dtype, seed)
    lses[np.random.default_rng(seed).random(lses.shape) < empty] = -np.inf
    outs[np.isneginf(lses)] = np.nan
    assert_merged(outs, lses, dtype)


@pytest.mark.parametrize("edges", [(0, 5, 12), (0, 0, 12), (0, 1, 2, 12), (0, 12, 12, 12)])
def test_parts_of_the_keys_merge_to_the_whole(edges):
    random = np.random.default_rng(3)
    q, k, v = (random.standard_normal((2, rows, 4)) for rows in (6, 12, 12))
    parts = [
        reference.attention(q, k[:, start:stop], v[:, start:stop], return_lse=True)
        for start, stop in itertools.pairwise(edges)
    ]
    out, lse = merge_states([part[0] for part in parts], [part[1] for part in parts])
    whole_out, whole_lse = reference.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, whole_out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_state_comes_back_unchanged(dtype):
    outs, lses = random_states(1, (3, 5, 4), dtype)
    out, lse = merge_states(outs, lses)
    np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_array_equal(lse, lses[0])
    assert not np.shares_memory(out, outs)
    assert not np.shares_memory(lse, lses)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_empty_state_has_weight_zero_whatever_it_holds(garbage, position):
    outs, lses = random_states(2, (4, 3))
    expected_out, expected_lse = merge_states(outs, lses)
    outs = np.insert(outs, position, np.float32(garbage), axis=0)
    lses = np.insert(lses, position, -np.inf, axis=0)
    out, lse = merge_states(outs, lses)
    np.testing.assert_array_equal(out, expected_out)
    np.testing.assert_array_equal(lse, expected_lse)


def test_rows_in_which_every_state_is_empty_are_zero():
    outs, lses = random_states(3, (4, 2))
    lses[:, 1] = -np.inf
    outs[:, 1] = np.nan
    out, lse = assert_merged(outs, lses)
    assert not out[1].any()
    assert np.isneginf(lse[1])
    assert np.isfinite(lse[[0, 2, 3]]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_lse_of_nan_or_infinity_makes_its_row_nan(bad):
    outs, lses = random_states(2, (3, 2))
    expected_out, expected_lse = merge_states(outs, lses)
    lses[1, 1] = bad
    out, lse = merge_states(outs, lses)
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1])
    np.testing.assert_array_equal(out[[0, 2]], expected_out[[0, 2]])
    np.testing.assert_array_equal(lse[[0, 2]], expected_lse[[0, 2]])


def test_nan_of_a_state_that_counts_shows_where_it_stands():
    outs, lses = random_states(2, (3, 4))
    outs[0, 1, 2] = np.nan
    lses[0, 1] = lses[1, 1] - 1000  # even if its weight underflows
    out, lse = merge_states(outs, lses)
    expected = np.zeros(out.shape, bool)
    expected[1, 2] = True
    np.testing.assert_array_equal(np.isnan(out), expected)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("level", [-3e38, -1e4, 1e4, 3e38])
def test_level_of_the_lses_neither_overflows_nor_underflows(level):
    outs, _ = random_states(2, (3, 4))
    lses = np.full((2, 3), level, np.float32)
    out, lse = merge_states(outs, lses)
    np.testing.assert_allclose(out, outs.mean(axis=0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(lse, lses[0] + np.float32(np.log(2)))


def test_sum_of_many_large_values_stays_finite():
    largest = np.finfo(np.float32).max / 2
    out, _ = merge_states(np.full((8, 2, 3), largest, np.float32), np.zeros((8, 2), np.float32))
    np.testing.assert_array_equal(out, largest)


def test_constant_outs_stay_constant_and_order_does_not_matter():
    outs, lses = random_states(6, (5, 3), np.float64)
    out, lse = merge_states(outs, lses)
    out_reversed, lse_reversed = merge_states(outs[::-1], lses[::-1])
    np.testing.assert_allclose(out, out_reversed, rtol=1e-13)
    np.testing.assert_allclose(lse, lse_reversed, rtol=1e-13)
    constant, _ = merge_states(np.full_like(outs, 7.0), lses)
    np.testing.assert_allclose(constant, 7.0, rtol=1e-15)


def test_sequences_stacks_layouts_and_byte_orders_agree():
    outs, lses = random_states(3, (2, 5, 4))
    expected_out, expected_lse = merge_states(outs, lses)
    for container in (outs.copy, lambda: list(outs), lambda: tuple(outs), lambda: np.asfortranarray(outs)):
        arguments = container()
        for lse_argument in (lses, list(lses), lses.astype(">f4")):
            out, lse = merge_states(arguments, lse_argument)
            np.testing.assert_array_equal(out, expected_out)
            np.testing.assert_array_equal(lse, expected_lse)
    swapped, _ = merge_states(outs.astype(">f4"), lses)
    np.testing.assert_array_equal(swapped, expected_out)
    assert swapped.dtype.isnative


def test_lists_and_integers_become_float64():
    out, lse = merge_states([[[4]], [[8]]], [[0], [0]])
    np.testing.assert_array_equal(out, [[6.0]])
    np.testing.assert_allclose(lse, [np.log(2)])
    assert out.dtype == lse.dtype == np.float64


def test_inputs_are_read_only_and_untouched():
    outs, lses = random_states(3, (4, 2))
    lses[0, 1] = -np.inf
    copies = outs.copy(), lses.copy()
    outs.flags.writeable = lses.flags.writeable = False
    merge_states(outs, lses)
    np.testing.assert_array_equal(outs, copies[0])
    np.testing.assert_array_equal(lses, copies[1])


def test_warns_and_raises_nothing_under_a_strict_error_state():
    outs, lses = random_states(3, (4, 2), np.float16)
    lses[:, 0], lses[0, 1], lses[1, 2] = -np.inf, np.inf, np.nan
    with np.errstate(all="raise"):
        out, lse = merge_states(outs, lses)
    assert np.isneginf(lse[0])
    assert np.isfinite(out[3]).all()


O, L = random_states(2, (3, 4))


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ([], [], ValueError, r"outs must hold at least one state, got none"),
        (np.empty((0, 3, 4)), np.empty((0, 3)), ValueError, r"outs must hold at least one state, got none"),
        (O, L[:1], ValueError, r"lses must hold one array for each of the 2 states, got 1"),
        (O[0], L[0], ValueError, r"outs\[0\] must have shape \(..., N, E\), got \(4,\)"),
        ([O[0], O[1, :2]], L, ValueError, r"outs\[1\] must have shape \(3, 4\) to match outs\[0\], got \(2, 4\)"),
        (O, L[:, :2], ValueError, r"lses\[0\] must have shape \(3,\) to match outs, got \(2,\)"),
        (O, [L[0], L[1, :, None]], ValueError, r"lses\[1\] must have shape \(3,\) to match outs, got \(3, 1\)"),
        ([O[0], O[1].astype(np.float64)], L, TypeError, r"outs\[1\] must be float32 to match outs\[0\], got float64"),
        (O, L.astype(np.float64), TypeError, r"lses\[0\] must be float32 to match float32 outs, got float64"),
        (O.astype(np.float64), L, TypeError, r"lses\[0\] must be float64 to match float64 outs, got float32"),
        (O.astype(np.float16), L.astype(np.float16), TypeError, r"lses\[0\] must be float32 to match float16 outs"),
        (O * 1j, L, TypeError, r"outs\[0\] must be float32, .* got complex64"),
        (O, list("ab"), TypeError, r"lses\[0\] must be .* got <U1"),
        ([None, None], L, TypeError, r"outs\[0\] must be .* got object"),
        (5, L, TypeError, r"outs must be a sequence of arrays or one stacked array, got int"),
        (O, "ab", TypeError, r"lses must be a sequence of arrays or one stacked array, got str"),
        (np.array(1.0), L, ValueError, r"outs must have a first axis that runs over the states, got shape \(\)"),
    ],
)
def test_errors_name_argument_rule_and_value(outs, lses, error, message):
    with pytest.raises(error, match=message):
        merge_states(outs, lses)


def test_more_states_than_memory_are_refused_at_once():
    """Views that repeat one number cost nothing to make; going through their items would take all memory."""
    endless, log = np.broadcast_to(np.float32(1), (1 << 40,)), np.zeros((1, 2), np.float32)
    with pytest.raises(ValueError, match=r"one array for each of the 1099511627776 states, got 1"):
        merge_states(endless, log)
    with pytest.raises(ValueError, match=r"outs\[0\] must have shape \(\.\.\., N, E\), got \(\)"):
        merge_states(endless, endless)
