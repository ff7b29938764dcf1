// The register tiles: the innermost loops of attention, with their accumulators kept in registers.
//
// A lane is one query. A panel is `panel_lanes` queries, stored transposed as [feature][lane]; the tiles
// broadcast keys and values straight from the caller's rows.
//
//   score tile    scores[key][lane]  = sum over d of  k[key][d] * panel[d][lane]     (d: words, see products.hpp)
//   value tile    sums[feature][lane] = sum over key of  v[key][feature] * weights[key][lane]
//
// Registers (`rows` x `vectors` accumulators + `vectors` loaded + 1 broadcast must fit):
//   16 registers (SSE2, AVX2): 6 x 2 + 2 + 1 = 15.     32 registers (AVX-512, NEON): 8 x 2 + 2 + 1 = 19.
// A tile needs rows + vectors loads for rows * vectors multiply-adds, so both are bound by arithmetic.
#pragma once

#include <limits>

#include "exponential.hpp"
#include "products.hpp"

namespace {

constexpr int panel_vectors = 2;
#if FASTATTN_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int tile_rows = 8;
#else
constexpr int tile_rows = 6;
#endif
constexpr int tile_rows_for(int vectors) { return vectors == 1 ? 2 * tile_rows : tile_rows; }
template <typename T>
constexpr int panel_lanes_of = panel_vectors * lanes_of<T>;

template <typename T>
constexpr int panel_lanes(const T*) {
    return panel_lanes_of<T>;
}

template <typename T>
constexpr T minus_infinity = -std::numeric_limits<T>::infinity();

// scores (ROWS, lanes), panel (n_words, lanes), k (ROWS, n_words) with rows k_stride words apart,
// maximum (lanes): raised to the largest score of each lane when MAXIMUM (a NaN score leaves it alone).
template <typename T, int ROWS, int VECTORS, bool MAXIMUM, typename Product>
FASTATTN_NOINLINE void score_rows(T* scores, const T* panel, const T* k, std::ptrdiff_t k_stride,
                                  std::ptrdiff_t n_words, T* maximum) {
    constexpr int n = lanes_of<T>;
    Vector<T> sums[ROWS][VECTORS] = {};
    FASTATTN_UNROLL_TWICE
    for (std::ptrdiff_t d = 0; d < n_words; ++d) {
        Vector<T> query[VECTORS];
        FASTATTN_UNROLL
        for (int c = 0; c < VECTORS; ++c) query[c] = load(panel + d * panel_lanes_of<T> + c * n);
        FASTATTN_UNROLL
        for (int r = 0; r < ROWS; ++r) {
            const Vector<T> key = Product::word(k + r * k_stride + d);
            FASTATTN_UNROLL
            for (int c = 0; c < VECTORS; ++c) sums[r][c] = Product::add(sums[r][c], key, query[c]);
        }
    }
    FASTATTN_UNROLL
    for (int c = 0; c < VECTORS; ++c) {
        FASTATTN_UNROLL
        for (int r = 0; r < ROWS; ++r) store(scores + r * panel_lanes_of<T> + c * n, sums[r][c]);
        if constexpr (MAXIMUM) {
            Vector<T> top = load(maximum + c * n);
            FASTATTN_UNROLL
            for (int r = 0; r < ROWS; ++r) top = larger<T>(sums[r][c], top);
            store(maximum + c * n, top);
        }
    }
}

// sums (ROWS, lanes) = sums * rescale + the block's own sum, which starts from zero so that rounding errors grow with
// the number of blocks and not of keys. A null rescale: there are no sums yet. weights (n_keys, lanes), v (n_keys,
// ROWS), its rows v_stride apart.
template <typename T, int ROWS, int VECTORS>
FASTATTN_NOINLINE void value_rows(T* sums, const T* weights, const T* v, std::ptrdiff_t v_stride,
                                  std::ptrdiff_t n_keys, const T* rescale) {
    constexpr int n = lanes_of<T>;
    Vector<T> block[ROWS][VECTORS] = {};
    FASTATTN_UNROLL_TWICE
    for (std::ptrdiff_t key = 0; key < n_keys; ++key) {
        Vector<T> weight[VECTORS];
        FASTATTN_UNROLL
        for (int c = 0; c < VECTORS; ++c) weight[c] = load(weights + key * panel_lanes_of<T> + c * n);
        FASTATTN_UNROLL
        for (int r = 0; r < ROWS; ++r) {
            const Vector<T> value = broadcast(v[key * v_stride + r]);
            FASTATTN_UNROLL
            for (int c = 0; c < VECTORS; ++c) block[r][c] = block[r][c] + value * weight[c];
        }
    }
    FASTATTN_UNROLL
    for (int c = 0; c < VECTORS; ++c) {
        T* at = sums + c * n;
        if (!rescale) {
            FASTATTN_UNROLL
            for (int r = 0; r < ROWS; ++r) store(at + r * panel_lanes_of<T>, block[r][c]);
        } else {
            const Vector<T> factor = load(rescale + c * n);
            FASTATTN_UNROLL
            for (int r = 0; r < ROWS; ++r)
                store(at + r * panel_lanes_of<T>, load(at + r * panel_lanes_of<T>) * factor + block[r][c]);
        }
    }
}

// The run-time number of rows (1 to tile_rows_for(vectors)) and of vectors (1 or 2) become template arguments.
template <typename T, int VECTORS, bool MAXIMUM, typename Product, int ROWS = tile_rows_for(VECTORS)>
FASTATTN_INLINE void score_rows_switch(int rows, T* scores, const T* panel, const T* k, std::ptrdiff_t k_stride,
                                       std::ptrdiff_t n_words, T* maximum) {
    if (rows == ROWS)
        score_rows<T, ROWS, VECTORS, MAXIMUM, Product>(scores, panel, k, k_stride, n_words, maximum);
    else if constexpr (ROWS > 1)
        score_rows_switch<T, VECTORS, MAXIMUM, Product, ROWS - 1>(rows, scores, panel, k, k_stride, n_words, maximum);
}

template <typename T, int VECTORS, int ROWS = tile_rows_for(VECTORS)>
FASTATTN_INLINE void value_rows_switch(int rows, T* sums, const T* weights, const T* v, std::ptrdiff_t v_stride,
                                       std::ptrdiff_t n_keys, const T* rescale) {
    if (rows == ROWS)
        value_rows<T, ROWS, VECTORS>(sums, weights, v, v_stride, n_keys, rescale);
    else if constexpr (ROWS > 1)
        value_rows_switch<T, VECTORS, ROWS - 1>(rows, sums, weights, v, v_stride, n_keys, rescale);
}

template <typename T, typename Product>
inline void score_tile_of(int rows, int vectors, bool keep_maximum, T* scores, const T* panel, const T* k,
                          std::ptrdiff_t k_stride, std::ptrdiff_t n_words, T* maximum) {
    if (vectors == 1) {
        if (keep_maximum)
            score_rows_switch<T, 1, true, Product>(rows, scores, panel, k, k_stride, n_words, maximum);
        else
            score_rows_switch<T, 1, false, Product>(rows, scores, panel, k, k_stride, n_words, maximum);
    } else {
        if (keep_maximum)
            score_rows_switch<T, 2, true, Product>(rows, scores, panel, k, k_stride, n_words, maximum);
        else
            score_rows_switch<T, 2, false, Product>(rows, scores, panel, k, k_stride, n_words, maximum);
    }
}

template <typename T>
inline void score_tile(int product, int rows, int vectors, bool keep_maximum, T* scores, const T* panel, const T* k,
                       std::ptrdiff_t k_stride, std::ptrdiff_t n_words, T* maximum) {
#if FASTATTN_PAIR_PRODUCTS
    if constexpr (sizeof(T) == 4) {
        if (product == product_pairs)
            return score_tile_of<T, Pairs>(rows, vectors, keep_maximum, scores, panel, k, k_stride, n_words, maximum);
        if (product == product_split_pairs)
            return score_tile_of<T, SplitPairs>(rows, vectors, keep_maximum, scores, panel, k, k_stride, n_words,
                                                maximum);
    }
#endif
    score_tile_of<T, Features<T>>(rows, vectors, keep_maximum, scores, panel, k, k_stride, n_words, maximum);
}

template <typename T>
inline void value_tile(int rows, int vectors, T* sums, const T* weights, const T* v, std::ptrdiff_t v_stride,
                       std::ptrdiff_t n_keys, const T* rescale) {
    if (vectors == 1)
        value_rows_switch<T, 1>(rows, sums, weights, v, v_stride, n_keys, rescale);
    else
        value_rows_switch<T, 2>(rows, sums, weights, v, v_stride, n_keys, rescale);
}

}  // namespace
