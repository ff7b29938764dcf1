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

// factor = 1 / total in all lanes of so many vectors; false when some total is 0 and needs a closer look.
template <typename T>
inline bool reciprocals(int vectors, T* factor, const T* total) {
    const Vector<T> zero = broadcast<T>(T(0)), one = broadcast<T>(T(1));
    bool none_zero = true;
    for (int c = 0; c < vectors; ++c) {
        const Vector<T> divisor = load(total + c * lanes_of<T>);
        store(factor + c * lanes_of<T>, one / divisor);
        none_zero &= !any_of<T>(divisor == zero);
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
