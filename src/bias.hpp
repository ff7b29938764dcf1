// What is done to scores before the softmax: scale, cap, and everything that is added: float masks, biases, ALiBi.
#pragma once

#include <cmath>

#include "tiles.hpp"

namespace {

// scores = cap * tanh(scale * scores / cap). Here and below `count` numbers are whole vectors.
template <typename T>
FASTATTN_NOINLINE void cap_scores(T* scores, std::ptrdiff_t count, T scale, T cap) {
    const Vector<T> limit = broadcast<T>(cap), factor = broadcast<T>(scale);
    for (std::ptrdiff_t i = 0; i < count; i += lanes_of<T>)
        store(scores + i, limit * tanh_of<T>(load(scores + i) * factor / limit));
}

// sum, which is a + b, but b = -inf excludes, whatever a is, and a finite sum that would overflow stays at the largest
// finite number, so that finfo.min is an ordinary bias.
template <typename T>
FASTATTN_INLINE Vector<T> limit_sum(Vector<T> sum, Vector<T> a, Vector<T> b) {
    const Vector<T> lowest = broadcast<T>(minus_infinity<T>), highest = broadcast<T>(-minus_infinity<T>);
    sum = select<T>((sum == lowest) & (a > lowest), broadcast<T>(std::numeric_limits<T>::lowest()), sum);
    sum = select<T>((sum == highest) & (a < highest) & (b < highest), broadcast<T>(std::numeric_limits<T>::max()), sum);
    return select<T>(b == lowest, lowest, sum);
}

// scale * score + bias, the product rounded first, so that equal scores stay equal however large they are. A moderate
// bias needs no limits.
template <typename T, bool MODERATE>
FASTATTN_INLINE Vector<T> biased(Vector<T> score, Vector<T> scale, Vector<T> bias) {
    const Vector<T> scaled = opaque<T>(score * scale), sum = scaled + bias;
    return MODERATE ? sum : limit_sum<T>(sum, scaled, bias);
}

// Adding a bias of at most this size carries no finite score beyond its type.
template <typename T>
constexpr T moderate_bias = T(1e30);

// Whether `count` biases, whole vectors, are all moderate.
template <typename T>
FASTATTN_NOINLINE bool are_moderate(const T* bias, std::ptrdiff_t count) {
    Vector<T> largest = broadcast<T>(T(0));
    for (std::ptrdiff_t i = 0; i < count; i += lanes_of<T>) largest = larger<T>(absolute<T>(load(bias + i)), largest);
    return !any_of<T>(largest > broadcast<T>(moderate_bias<T>));
}

// scores = change(scores, i), in registers of which every second one belongs to the same lanes. Unless maximum is null
// it is raised to the largest score of each lane.
template <typename T, typename Change>
FASTATTN_INLINE void change_scores(T* scores, std::ptrdiff_t count, T* maximum, Change change) {
    constexpr int n = lanes_of<T>;
    Vector<T> top[2] = {broadcast<T>(minus_infinity<T>), broadcast<T>(minus_infinity<T>)};
    for (std::ptrdiff_t i = 0; i < count; i += 2 * n) {
        FASTATTN_UNROLL
        for (int c = 0; c < 2; ++c) {
            if (c > 0 && i + n >= count) break;
            const Vector<T> score = change(load(scores + i + c * n), i + c * n);
            store(scores + i + c * n, score);
            top[c] = larger<T>(score, top[c]);
        }
    }
    if (!maximum) return;
    FASTATTN_UNROLL
    for (int c = 0; c < 2; ++c) store(maximum + c * n, larger<T>(top[c], load(maximum + c * n)));
}

template <typename T>
FASTATTN_NOINLINE void scale_scores(T* scores, std::ptrdiff_t count, T scale, T* maximum) {
    const Vector<T> factor = broadcast<T>(scale);
    change_scores<T>(scores, count, maximum, [=](Vector<T> score, std::ptrdiff_t) { return score * factor; });
}

// scores = scale * scores + bias
template <typename T>
FASTATTN_NOINLINE void add_bias(bool moderate, T* scores, const T* bias, std::ptrdiff_t count, T scale, T* maximum) {
    const Vector<T> factor = broadcast<T>(scale);
    if (moderate)
        change_scores<T>(scores, count, maximum, [=](Vector<T> score, std::ptrdiff_t i) {
            return biased<T, true>(score, factor, load(bias + i));
        });
    else
        change_scores<T>(scores, count, maximum, [=](Vector<T> score, std::ptrdiff_t i) {
            return biased<T, false>(score, factor, load(bias + i));
        });
}

// One register of scores = scale * scores + biases. Returns top, raised to the largest of them.
template <typename T, bool MODERATE>
FASTATTN_INLINE Vector<T> add_register(T* at, Vector<T> scale, Vector<T> bias, Vector<T> top) {
    const Vector<T> score = biased<T, MODERATE>(load(at), scale, bias);
    store(at, score);
    return larger<T>(score, top);
}

// scores (n_keys, lanes) = scale * scores + the lanes' rows of biases (n_keys each), transposed in registers. Unless
// maximum is null it is raised to the largest score of each lane.
template <typename T>
FASTATTN_NOINLINE void add_rows(T* scores, const T* const* rows, std::ptrdiff_t n_keys, T scale, T* maximum) {
    constexpr int n = lanes_of<T>, lanes = panel_lanes_of<T>;
    const Vector<T> factor = broadcast<T>(scale), limit = broadcast<T>(moderate_bias<T>);
    for (int group = 0; group < lanes; group += n) {
        Vector<T> top = broadcast<T>(minus_infinity<T>);
        std::ptrdiff_t key = 0;
        for (; key + n <= n_keys; key += n) {
            T* at = scores + key * lanes + group;
            Vector<T> square[n], largest = broadcast<T>(T(0));
            FASTATTN_UNROLL
            for (int i = 0; i < n; ++i) {
                square[i] = load(rows[group + i] + key);
                largest = larger<T>(absolute<T>(square[i]), largest);
            }
            transpose<T>(square);
            if (any_of<T>(largest > limit)) {
                FASTATTN_UNROLL
                for (int i = 0; i < n; ++i) top = add_register<T, false>(at + i * lanes, factor, square[i], top);
            } else {
                FASTATTN_UNROLL
                for (int i = 0; i < n; ++i) top = add_register<T, true>(at + i * lanes, factor, square[i], top);
            }
        }
        for (; key < n_keys; ++key) {
            T column[n];
            for (int i = 0; i < n; ++i) column[i] = rows[group + i][key];
            top = add_register<T, false>(scores + key * lanes + group, factor, load(column), top);
        }
        if (maximum) store(maximum + group, larger<T>(top, load(maximum + group)));
    }
}

// block += bias; -inf in either excludes.
template <typename T>
FASTATTN_NOINLINE void combine_bias(T* block, const T* bias, std::ptrdiff_t count) {
    const Vector<T> lowest = broadcast<T>(minus_infinity<T>);
    for (std::ptrdiff_t i = 0; i < count; i += lanes_of<T>) {
        const Vector<T> before = load(block + i), added = load(bias + i);
        store(block + i, select<T>(before == lowest, lowest, limit_sum<T>(before + added, before, added)));
    }
}

// bias (n_keys, n_lanes) += (or = when `begin`) -slope * |distance - key|, lane by lane. What is excluded stays so,
// and what is finite stays finite.
template <typename T>
FASTATTN_NOINLINE void add_slopes(T* bias, bool begin, std::ptrdiff_t n_keys, int n_lanes, const T* slopes,
                                  const T* distance) {
    constexpr T largest = std::numeric_limits<T>::max();
    for (std::ptrdiff_t key = 0; key < n_keys; ++key) {
        for (int lane = 0; lane < n_lanes; ++lane) {
            T* at = bias + key * n_lanes + lane;
            T product = -slopes[lane] * std::fabs(distance[lane] - T(key));
            product = product < -largest ? -largest : product > largest ? largest : product;
            const T before = begin ? T(0) : *at, sum = before + product;
            *at = std::isinf(before) ? before : sum < -largest ? -largest : sum > largest ? largest : sum;
        }
    }
}

// Whether every number of the rows (n_columns each) is `value`; looks no further than needed.
template <typename T>
FASTATTN_NOINLINE bool all_equal(const T* const* rows, int n_rows, std::ptrdiff_t n_columns, T value) {
    constexpr int n = lanes_of<T>;
    const Vector<T> wanted = broadcast<T>(value), zero = broadcast<T>(T(0)), one = broadcast<T>(T(1));
    for (int row = 0; row < n_rows; ++row) {
        if (n_columns > 0 && rows[row][0] != value) return false;
        if (row > 0 && rows[row] == rows[row - 1]) continue;
        Vector<T> same = one;
        std::ptrdiff_t i = 0;
        for (; i + n <= n_columns; i += n) same = select<T>(load(rows[row] + i) == wanted, same, zero);
        for (int lane = 0; lane < n; ++lane)
            if (same[lane] == T(0)) return false;
        for (; i < n_columns; ++i)
            if (rows[row][i] != value) return false;
    }
    return true;
}

}  // namespace
