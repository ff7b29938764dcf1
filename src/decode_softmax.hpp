// Softmax of a decode block, and the factors of int8 keys and values: scores (n_keys padded to whole vectors, ROWS).
#pragma once

#include "rows.hpp"
#include "softmax.hpp"

namespace {

// scores (n_keys padded to whole vectors, ROWS) *= scales (n_keys, padded alike). With WEIGHTS those that are 0 stay 0,
// so that an excluded key's scale may be anything.
template <typename T, int ROWS, bool WEIGHTS>
FASTATTN_NOINLINE void multiply_rows(T* scores, const T* scales, std::ptrdiff_t n_keys) {
    constexpr int n = lanes_of<T>, keys = n / ROWS;
    const Vector<T> zero = broadcast<T>(T(0));
    for (std::ptrdiff_t key = 0; key < n_keys; key += keys) {
        T spread[n];
        FASTATTN_UNROLL
        for (int lane = 0; lane < n; ++lane) spread[lane] = scales[key + lane / ROWS];
        const Vector<T> score = load(scores + key * ROWS), scaled = score * load(spread);
        store(scores + key * ROWS, WEIGHTS ? select<T>(score == zero, zero, scaled) : scaled);
    }
}

// Softmax of a block of scores (n_keys padded to whole vectors, ROWS): maximum and total (ROWS) are brought up to
// date, rescale (ROWS) is what older sums must be multiplied by. Lane by lane over the block, rows combined once.
template <typename T, int ROWS>
FASTATTN_NOINLINE void decode_softmax_rows(T unit, T* scores, std::ptrdiff_t n_keys, T* maximum, T* total,
                                           T* rescale) {
    constexpr int n = lanes_of<T>, keys = n / ROWS;
    const std::ptrdiff_t end = (n_keys + keys - 1) / keys * n;
    Vector<T> top = broadcast<T>(minus_infinity<T>);
    for (std::ptrdiff_t i = 0; i < end; i += n) top = larger<T>(load(scores + i), top);
    T lanes[n], reference[n], previous[ROWS];
    store(lanes, top);
    for (int r = 0; r < ROWS; ++r) {
        previous[r] = maximum[r];
        for (int lane = r; lane < n; lane += ROWS) maximum[r] = lanes[lane] > maximum[r] ? lanes[lane] : maximum[r];
    }
    for (int lane = 0; lane < n; ++lane) {
        const T highest = maximum[lane % ROWS];
        reference[lane] = highest == minus_infinity<T> ? T(0) : highest;
        lanes[lane] = previous[lane % ROWS];
    }
    const Vector<T> from = load(reference);
    const Vector<T> factor = exp2_nonpositive<T>(load(lanes) - from, unit);
    Vector<T> sum = broadcast<T>(T(0));
    for (std::ptrdiff_t i = 0; i < end; i += n) {
        const Vector<T> weight = exp2_nonpositive<T>(load(scores + i) - from, unit);
        store(scores + i, weight);
        sum = sum + weight;
    }
    store(reference, sum);
    store(lanes, factor);
    for (int r = 0; r < ROWS; ++r) {
        T added = 0;
        for (int lane = r; lane < n; lane += ROWS) added += reference[lane];
        rescale[r] = lanes[r];
        total[r] = total[r] * rescale[r] + added;
    }
}

}  // namespace
