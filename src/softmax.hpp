// Online softmax over one block of scores, and what may be done to the scores before it. Lanes are queries and
// stay independent: there is no horizontal reduction.
#pragma once

#include <cmath>

#include "tiles.hpp"

namespace {

// Raises maximum (lanes) to the largest of scores (n_keys, lanes). NaN scores are passed over: they come back
// as NaN weights.
template <typename T>
FASTATTN_NOINLINE void raise_maximum(T* maximum, const T* scores, std::ptrdiff_t n_keys) {
    FASTATTN_UNROLL
    for (int c = 0; c < panel_vectors; ++c) {
        Vector<T> top = load(maximum + c * lanes_of<T>);
        for (std::ptrdiff_t key = 0; key < n_keys; ++key)
            top = larger<T>(load(scores + key * panel_lanes_of<T> + c * lanes_of<T>), top);
        store(maximum + c * lanes_of<T>, top);
    }
}

// scores (KEYS, lanes) become weights, which are added to sum.
template <typename T, int KEYS, int VECTORS>
FASTATTN_INLINE void exponentiate_keys(T* scores, Vector<T> unit, Vector<T> least,
                                       const Vector<T> (&reference)[VECTORS], Vector<T> (&sum)[VECTORS]) {
    Vector<T> x[KEYS * VECTORS];
    FASTATTN_UNROLL
    for (int i = 0; i < KEYS * VECTORS; ++i) {
        x[i] = load(scores + i / VECTORS * panel_lanes_of<T> + i % VECTORS * lanes_of<T>);
        x[i] = x[i] - reference[i % VECTORS];
    }
    exp2_nonpositive<T, KEYS * VECTORS>(x, unit, least);
    FASTATTN_UNROLL
    for (int i = 0; i < KEYS * VECTORS; ++i) {
        store(scores + i / VECTORS * panel_lanes_of<T> + i % VECTORS * lanes_of<T>, x[i]);
        sum[i % VECTORS] = sum[i % VECTORS] + x[i];
    }
}

// scores (n_keys, lanes) become weights 2**(unit * (score - maximum)); total and rescale are brought up to date.
// The difference is taken before it is multiplied, so large scores lose nothing to the change of base, and a finite
// score can be as large as its type allows. A lane whose maximum is still -inf has seen nothing; its reference is 0,
// so its weights are 0 and not NaN.
template <typename T, int VECTORS>
FASTATTN_NOINLINE void exponentiate(T unit_of_scores, T* scores, std::ptrdiff_t n_keys, const T* maximum,
                                    const T* previous, T* total, T* rescale) {
    constexpr int n = lanes_of<T>;
    const Vector<T> unit = broadcast<T>(unit_of_scores), least = lowest_exponent<T>(unit_of_scores);
    const Vector<T> lowest = broadcast<T>(minus_infinity<T>), zero = broadcast<T>(T(0));
    Vector<T> reference[VECTORS], sum[VECTORS] = {};
    FASTATTN_UNROLL
    for (int c = 0; c < VECTORS; ++c) {
        const Vector<T> top = load(maximum + c * n);
        reference[c] = select<T>(top == lowest, zero, top);
    }
    std::ptrdiff_t key = 0;
    for (; key + 2 <= n_keys; key += 2)
        exponentiate_keys<T, 2, VECTORS>(scores + key * panel_lanes_of<T>, unit, least, reference, sum);
    if (key < n_keys)
        exponentiate_keys<T, 1, VECTORS>(scores + key * panel_lanes_of<T>, unit, least, reference, sum);
    FASTATTN_UNROLL
    for (int c = 0; c < VECTORS; ++c) {
        const Vector<T> factor = exp2_nonpositive<T>(load(previous + c * n) - reference[c], unit_of_scores);
        store(rescale + c * n, factor);
        store(total + c * n, load(total + c * n) * factor + sum[c]);
    }
}

template <typename T>
inline void softmax_block(int vectors, T unit, T* scores, std::ptrdiff_t n_keys, const T* maximum, const T* previous,
                          T* total, T* rescale) {
    if (vectors == 1)
        exponentiate<T, 1>(unit, scores, n_keys, maximum, previous, total, rescale);
    else
        exponentiate<T, 2>(unit, scores, n_keys, maximum, previous, total, rescale);
}

// factor (lanes) = 1 / total; false when some total is 0 and needs a closer look.
template <typename T>
inline bool reciprocals(T* factor, const T* total) {
    bool none_zero = true;
    for (int lane = 0; lane < panel_lanes_of<T>; ++lane) {
        factor[lane] = T(1) / total[lane];
        none_zero &= total[lane] != T(0);
    }
    return none_zero;
}

// scores (n_keys, lanes) become -inf where key is outside [first[lane], last[lane]), bounds
// that are numbers of at most the block's size, exact in any floating type.
template <typename T>
FASTATTN_NOINLINE void exclude_outside(T* scores, std::ptrdiff_t from_key, std::ptrdiff_t to_key, const T* first,
                                       const T* last) {
    const Vector<T> lowest = broadcast<T>(minus_infinity<T>);
    FASTATTN_UNROLL
    for (int c = 0; c < panel_vectors; ++c) {
        const Vector<T> low = load(first + c * lanes_of<T>), high = load(last + c * lanes_of<T>);
        for (std::ptrdiff_t key = from_key; key < to_key; ++key) {
            T* at = scores + key * panel_lanes_of<T> + c * lanes_of<T>;
            const Vector<T> position = broadcast<T>(T(key));
            store(at, select<T>((position >= low) & (position < high), load(at), lowest));
        }
    }
}

// scores = cap * tanh(scale * scores / cap). Here and below `count` numbers are whole vectors.
template <typename T>
FASTATTN_NOINLINE void cap_scores(T* scores, std::ptrdiff_t count, T scale, T cap) {
    const Vector<T> limit = broadcast<T>(cap), factor = broadcast<T>(scale);
    for (std::ptrdiff_t i = 0; i < count; i += lanes_of<T>)
        store(scores + i, limit * tanh_of<T>(load(scores + i) * factor / limit));
}

// a + b where both are finite; b = -inf excludes, whatever a is. A finite sum that would overflow stays at the
// largest finite number, so finfo.min is an ordinary bias.
template <typename T>
FASTATTN_INLINE Vector<T> add_excluding(Vector<T> a, Vector<T> b) {
    const Vector<T> lowest = broadcast<T>(minus_infinity<T>), highest = broadcast<T>(-minus_infinity<T>);
    Vector<T> sum = a + b;
    sum = select<T>((sum == lowest) & (a > lowest), broadcast<T>(std::numeric_limits<T>::lowest()), sum);
    sum = select<T>((sum == highest) & (a < highest) & (b < highest), broadcast<T>(std::numeric_limits<T>::max()), sum);
    return select<T>(b == lowest, lowest, sum);
}

// Whether every bias is so small that adding it carries no finite score beyond its type: the sum needs no care.
template <typename T>
FASTATTN_NOINLINE bool is_moderate(const T* bias, std::ptrdiff_t count) {
    Vector<T> largest = broadcast<T>(T(0));
    for (std::ptrdiff_t i = 0; i < count; i += lanes_of<T>) largest = larger<T>(absolute<T>(load(bias + i)), largest);
    for (int lane = 0; lane < lanes_of<T>; ++lane)
        if (largest[lane] > T(1e30)) return false;
    return true;
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
            return score * factor + load(bias + i);
        });
    else
        change_scores<T>(scores, count, maximum, [=](Vector<T> score, std::ptrdiff_t i) {
            return add_excluding<T>(score * factor, load(bias + i));
        });
}

// scores become -inf where bias, of 0 and -inf only, is -inf.
template <typename T>
FASTATTN_NOINLINE void exclude_masked(T* scores, const T* bias, std::ptrdiff_t count) {
    const Vector<T> lowest = broadcast<T>(minus_infinity<T>);
    for (std::ptrdiff_t i = 0; i < count; i += lanes_of<T>) {
        const Vector<T> mask = load(bias + i);
        store(scores + i, select<T>(mask == lowest, lowest, load(scores + i)));
    }
}

// block += bias; -inf in either excludes.
template <typename T>
FASTATTN_NOINLINE void combine_bias(T* block, const T* bias, std::ptrdiff_t count) {
    const Vector<T> lowest = broadcast<T>(minus_infinity<T>);
    for (std::ptrdiff_t i = 0; i < count; i += lanes_of<T>) {
        const Vector<T> before = load(block + i);
        store(block + i, select<T>(before == lowest, lowest, add_excluding<T>(before, load(bias + i))));
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
            *at = before == minus_infinity<T> ? before : sum < -largest ? -largest : sum;
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

// Before the first block: a maximum of -inf, no total. State: maximum, previous maximum, total.
template <typename T>
inline void begin_softmax(T* state) {
    constexpr std::ptrdiff_t lanes = panel_lanes_of<T>;
    for (std::ptrdiff_t i = 0; i < 2 * lanes; ++i) state[i] = minus_infinity<T>;
    for (std::ptrdiff_t i = 2 * lanes; i < 3 * lanes; ++i) state[i] = 0;
}

template <typename T>
inline void scale_weights(T* weights, std::ptrdiff_t count, T factor) {
    for (std::ptrdiff_t i = 0; i < count; ++i) weights[i] *= factor;
}

// As value_tile, for a block whose values hold NaN or infinity while some keys are excluded: an excluded key adds
// nothing, not even 0 * NaN. bias may be null. Finite sums round as value_tile's do, because the caller's choice
// between the two may depend on what else shares the block.
template <typename T>
FASTATTN_NOINLINE void value_selected(T* sums, const T* weights, const T* v, std::ptrdiff_t v_stride,
                                      std::ptrdiff_t n_keys, std::ptrdiff_t n_features, const T* rescale,
                                      const T* first, const T* last, const T* bias) {
    constexpr int lanes = panel_lanes_of<T>;
    const Vector<T> lowest = broadcast<T>(minus_infinity<T>), zero = broadcast<T>(T(0));
    for (int lane = 0; lane < lanes; lane += lanes_of<T>) {
        const Vector<T> low = load(first + lane), high = load(last + lane), factor = load(rescale + lane);
        for (std::ptrdiff_t feature = 0; feature < n_features; ++feature) {
            Vector<T> sum = zero;
            for (std::ptrdiff_t key = 0; key < n_keys; ++key) {
                const Vector<T> position = broadcast<T>(T(key));
                Vector<T> value = broadcast(v[key * v_stride + feature]);
                value = select<T>((position >= low) & (position < high), value, zero);
                if (bias) value = select<T>(load(bias + key * lanes + lane) == lowest, zero, value);
                sum = sum + value * load(weights + key * lanes + lane);
            }
            T* at = sums + feature * lanes + lane;
            store(at, load(at) * factor + sum);
        }
    }
}

}  // namespace
