// The tiles of decoding: few query rows against a long cache. Lanes are features, so that every key and value row is
// read once, in the order of memory, and at once for all rows.
//
//   dot tile       scores[key][row] = q[row] . k[key]         (a vector holds LANES / ROWS keys of ROWS rows)
//   weighted tile  sums[row][:]    += weights[key][row] * v[key]
//
// Keys and values are of the computing type, half types or int8 codes (Element), converted as they are loaded; the
// codes' scales go into scores and weights, one multiplication per key instead of one per feature.
#pragma once

#include "decode_softmax.hpp"
#include "prefetch.hpp"
#include "rows.hpp"

namespace {

constexpr int most_decode_rows = 8;
template <typename T>
constexpr int decode_rows_of = lanes_of<T> < most_decode_rows ? lanes_of<T> : most_decode_rows;

template <typename T>
constexpr int decode_rows(const T*) {
    return decode_rows_of<T>;
}

template <typename T>
constexpr int vector_lanes(const T*) {
    return lanes_of<T>;
}

// Sums of LANES registers: lane i of the result is the sum over the lanes of parts[i].
template <typename T, int HALF = lanes_of<T> / 2>
FASTATTN_INLINE Vector<T> sum_each(Vector<T> (&parts)[lanes_of<T>]) {
#if FASTATTN_VECTOR_EXTENSION
    constexpr auto all = std::make_index_sequence<std::size_t(lanes_of<T>)>{};
    FASTATTN_UNROLL
    for (int i = 0; i < HALF; ++i)
        parts[i] = exchange<T, HALF, false>(parts[i], parts[i + HALF], all) +
                   exchange<T, HALF, true>(parts[i], parts[i + HALF], all);
    if constexpr (HALF > 1)
        return sum_each<T, HALF / 2>(parts);
    else
        return parts[0];
#else
    Vector<T> sums;
    for (int i = 0; i < lanes_of<T>; ++i) {
        sums[i] = 0;
        for (int lane = 0; lane < lanes_of<T>; ++lane) sums[i] = sums[i] + parts[i][lane];
    }
    return sums;
#endif
}

// Keys of a block that lie one after another in memory, and their values.
struct Run {
    int head;                           // of the team
    std::ptrdiff_t first, n_keys;       // keys [first, first + n_keys) of the block
    std::ptrdiff_t k_ahead;             // bytes from a row of keys to the one to bring nearer
    const void* k;
    const void* v;
    const char* later;                  // rows to bring nearer while the values are summed
};

// Keys whose dot products go side by side. Rows of few bytes are bound by the chain of additions, longer ones by
// memory, whose prefetcher follows one row after the other.
template <typename Element, int ROWS>
constexpr int keys_together = sizeof(Element) == 1 ? 4 : sizeof(Element) == 2 && !(crosswise && ROWS == 1) ? 2 : 1;

// One vector of scores: keys of ROWS rows, n_keys of them unless the vector is WHOLE; the lanes beyond hold anything.
// Meanwhile the keys `ahead` bytes further and these keys' values (rows of v_bytes, v_row bytes apart) are brought
// nearer.
template <typename T, int ROWS, bool FIRST_LEVEL, bool WHOLE, typename Element>
FASTATTN_INLINE void dot_tile(T* scores, const T* q, const Element* k, std::ptrdiff_t k_stride, std::ptrdiff_t n_keys,
                              std::ptrdiff_t head_dim, std::ptrdiff_t ahead, const char* v, std::ptrdiff_t v_row,
                              std::ptrdiff_t v_bytes) {
    constexpr int n = lanes_of<T>, keys = n / ROWS, size = sizeof(Element);
    constexpr int together = keys < keys_together<Element, ROWS> ? keys : keys_together<Element, ROWS>;
    const std::ptrdiff_t width = (head_dim + n - 1) / n * n, whole = head_dim / n * n;
    Vector<T> parts[n];
    FASTATTN_UNROLL
    for (int first = 0; first < keys; first += together) {
        const Element* row[together];
        const char* value[together];
        Vector<T> sums[together * ROWS] = {};
        if (!WHOLE && first >= n_keys) {
            FASTATTN_UNROLL
            for (int i = 0; i < together * ROWS; ++i) parts[first * ROWS + i] = sums[i];
            continue;
        }
        FASTATTN_UNROLL
        for (int j = 0; j < together; ++j) {
            const bool there = WHOLE || first + j < n_keys;
            row[j] = k + (there ? first + j : 0) * k_stride;
            value[j] = v + (there ? first + j : 0) * v_row;
            if (!crosswise && there) prefetch_bytes<FIRST_LEVEL>(value[j], v_bytes);
        }
        const auto add_column = [&](std::ptrdiff_t d, bool new_line) FASTATTN_INLINE_LAMBDA {
            FASTATTN_UNROLL
            for (int j = 0; j < together; ++j) {
                if (new_line) prefetch<FIRST_LEVEL>((const char*)(row[j] + d) + ahead);
                if (crosswise && new_line && d * size < v_bytes) prefetch<FIRST_LEVEL>(value[j] + d * size);
                const Vector<T> x = load_as<T>(row[j] + d);
                FASTATTN_UNROLL
                for (int r = 0; r < ROWS; ++r)
                    sums[j * ROWS + r] = sums[j * ROWS + r] + x * load(q + r * width + d);
            }
        };
        std::ptrdiff_t d = 0;
        if constexpr (crosswise)
            for (; d + 4 * n <= whole; d += 4 * n) {
                add_column(d, true);
                add_column(d + n, n * size % 64 == 0);
                add_column(d + 2 * n, 2 * n * size % 64 == 0);
                add_column(d + 3 * n, n * size % 64 == 0);
            }
        for (; d < whole; d += n) add_column(d, d * size % 64 == 0);
        if (whole < head_dim) {
            FASTATTN_UNROLL
            for (int j = 0; j < together; ++j) {
                if (crosswise && whole * size < v_bytes) prefetch<FIRST_LEVEL>(value[j] + whole * size);
                const Vector<T> x = load_partial<T>(row[j] + whole, head_dim - whole);
                FASTATTN_UNROLL
                for (int r = 0; r < ROWS; ++r)
                    sums[j * ROWS + r] = sums[j * ROWS + r] + x * load(q + r * width + whole);
            }
        }
        FASTATTN_UNROLL
        for (int i = 0; i < together * ROWS; ++i) parts[first * ROWS + i] = sums[i];
        keep_order();
    }
    store(scores, sum_each<T>(parts));
}

// Scores of all runs, each with its head's queries, into its head's block.
template <typename T, int ROWS, bool FIRST_LEVEL, typename Element>
FASTATTN_NOINLINE void dot_rows(T* scores, std::ptrdiff_t scores_stride, const T* q, std::ptrdiff_t q_stride,
                                const Element* kind, const Run* runs, int n_runs, std::ptrdiff_t k_stride,
                                std::ptrdiff_t head_dim, std::ptrdiff_t v_row, std::ptrdiff_t v_bytes) {
    constexpr int keys = lanes_of<T> / ROWS;
    for (const Run* run = runs; run != runs + n_runs; ++run) {
        T* const first = scores + run->head * scores_stride + run->first * ROWS;
        const auto score_keys = [&](std::ptrdiff_t key, auto whole) FASTATTN_INLINE_LAMBDA {
            dot_tile<T, ROWS, FIRST_LEVEL, decltype(whole)::value>(
                first + key * ROWS, q + run->head * q_stride, (const Element*)run->k + key * k_stride, k_stride,
                run->n_keys - key, head_dim, run->k_ahead, (const char*)run->v + key * v_row, v_row, v_bytes);
        };
        std::ptrdiff_t key = 0;
        for (; key + keys <= run->n_keys; key += keys) score_keys(key, std::true_type{});
        if (key == run->n_keys) continue;
        if constexpr (FIRST_LEVEL == crosswise)
            score_keys(key, std::false_type{});
        else {  // one tile of less than a vector serves both
            const Run rest = {run->head, run->first + key, run->n_keys - key, run->k_ahead,
                              (const Element*)run->k + key * k_stride, (const char*)run->v + key * v_row, run->later};
            dot_rows<T, ROWS, crosswise>(scores, scores_stride, q, q_stride, kind, &rest, 1, k_stride, head_dim, v_row,
                                         v_bytes);
        }
    }
}

// Registers that a weighted tile sums in. Of one row eight: 128 features of 16 lanes.
template <int ROWS>
constexpr int most_sums = vector_bytes == 64 && ROWS > 1 ? 16 : 8;

// HELD of the rows: sums (HELD, VECTORS registers) = sums * rescale[row] + weights^T @ the values of every `step`-th
// run, one head's, of which each row is read from `feature` on. weights (keys of the block, ROWS). The same part of
// later rows, of later_bytes and later_row bytes apart, is brought nearer.
template <typename T, int ROWS, int HELD, int VECTORS, bool FIRST_LEVEL, typename Element>
FASTATTN_INLINE void weighted_tile(T* sums, std::ptrdiff_t sums_stride, const T* weights, const Element*,
                                   std::ptrdiff_t feature, const Run* runs, const Run* end, int step,
                                   std::ptrdiff_t v_stride, std::ptrdiff_t later_row, std::ptrdiff_t later_bytes,
                                   const T* rescale) {
    constexpr int n = lanes_of<T>, size = sizeof(Element);
    Vector<T> block[HELD][VECTORS] = {};
    for (const Run* run = runs; run < end; run += step) {
        const T* weight_row = weights + run->first * ROWS;
        const Element* row = (const Element*)run->v + feature;
        const char* later = run->later + feature * size;
        FASTATTN_UNROLL_TWICE
        for (std::ptrdiff_t key = 0; key < run->n_keys;
             ++key, row += v_stride, weight_row += ROWS, later += later_row) {
            if (feature * size < later_bytes) {
                FASTATTN_UNROLL
                for (int c = 0; c < VECTORS; ++c)
                    if (c * n * size % 64 == 0) prefetch<FIRST_LEVEL>(later + c * n * size);
            }
            Vector<T> value[VECTORS];
            FASTATTN_UNROLL
            for (int c = 0; c < VECTORS; ++c) value[c] = load_as<T>(row + c * n);
            FASTATTN_UNROLL
            for (int r = 0; r < HELD; ++r) {
                const Vector<T> weight = broadcast(weight_row[r]);
                FASTATTN_UNROLL
                for (int c = 0; c < VECTORS; ++c) block[r][c] = block[r][c] + weight * value[c];
            }
        }
    }
    FASTATTN_UNROLL
    for (int r = 0; r < HELD; ++r) {
        const Vector<T> factor = broadcast(rescale[r]);
        FASTATTN_UNROLL
        for (int c = 0; c < VECTORS; ++c) {
            T* at = sums + r * sums_stride + c * n;
            store(at, load(at) * factor + block[r][c]);
        }
    }
}

template <typename T, int ROWS, bool FIRST_LEVEL, typename Element>
FASTATTN_NOINLINE void weighted_rows(T* sums, const T* weights, const Element* kind, const Run* runs, const Run* end,
                                     int step, std::ptrdiff_t v_stride, std::ptrdiff_t n_features,
                                     std::ptrdiff_t later_row, std::ptrdiff_t later_bytes, const T* rescale) {
    constexpr int n = lanes_of<T>, held = ROWS < 4 ? ROWS : 4, most = most_sums<ROWS> / held;
    std::ptrdiff_t feature = 0;
    const auto sum_features = [&](auto vectors) FASTATTN_INLINE_LAMBDA {
        constexpr int together = decltype(vectors)::value;
        for (; feature + together * n <= n_features; feature += together * n)
            for (int r = 0; r < ROWS; r += held)
                weighted_tile<T, ROWS, held, together, FIRST_LEVEL>(
                    sums + r * n_features + feature, n_features, weights + r, kind, feature, runs, end, step, v_stride,
                    later_row, r == 0 ? later_bytes : 0, rescale + r);
    };
    sum_features(std::integral_constant<int, most>{});
    if constexpr (most > 4) sum_features(std::integral_constant<int, 4>{});
    if constexpr (most > 2) sum_features(std::integral_constant<int, 2>{});
    sum_features(std::integral_constant<int, 1>{});
    if (feature == n_features) return;
    // What is left is less than a vector. Vectors all the same: of scalars the compiler would round products and sums
    // apart, or not, as it sees fit.
    const std::ptrdiff_t rest = n_features - feature;
    Vector<T> block[ROWS] = {};
    for (const Run* run = runs; run < end; run += step)
        for (std::ptrdiff_t key = 0; key < run->n_keys; ++key) {
            const Vector<T> value = load_masked<T>((const Element*)run->v + key * v_stride + feature, rest);
            FASTATTN_UNROLL
            for (int r = 0; r < ROWS; ++r)
                block[r] = block[r] + broadcast(weights[(run->first + key) * ROWS + r]) * value;
        }
    FASTATTN_UNROLL
    for (int r = 0; r < ROWS; ++r) add_partial(sums + r * n_features + feature, rest, rescale[r], block[r]);
}

// As decode_values, bit for bit where sums are finite, but excluded keys, outside [first[row], last[row]) or of a bias
// (n_keys, rows) of -inf, add nothing, whatever their values hold. bias may be null.
template <typename T>
FASTATTN_NOINLINE void decode_selected(int rows, T* sums, const T* weights, const T* v, std::ptrdiff_t v_stride,
                                       std::ptrdiff_t n_features, const T* rescale, const std::ptrdiff_t* first,
                                       const std::ptrdiff_t* last, const T* bias) {
    constexpr std::ptrdiff_t n = lanes_of<T>;
    for (int row = 0; row < rows; ++row) {
        for (std::ptrdiff_t feature = 0; feature < n_features; feature += n) {
            const std::ptrdiff_t count = n_features - feature < n ? n_features - feature : n;
            Vector<T> block = {};
            for (std::ptrdiff_t key = first[row]; key < last[row]; ++key) {
                if (bias && bias[key * rows + row] == minus_infinity<T>) continue;
                const Vector<T> value = load_masked<T>(v + key * v_stride + feature, count);
                block = block + broadcast(weights[key * rows + row]) * value;
            }
            add_partial(sums + row * n_features + feature, count, rescale[row], block);
        }
    }
}

// sums (count) *= factor. Whether they were finite.
template <typename T>
FASTATTN_INLINE bool scale_sums(T* sums, std::ptrdiff_t count, T factor) {
    constexpr int n = lanes_of<T>;
    std::ptrdiff_t i = 0;
    T nothing = 0;
    if (count >= n) {
        Vector<T> differences = {};
        for (; i + n <= count; i += n) {
            const Vector<T> sum = load(sums + i);
            differences = differences + (sum - sum);
            store(sums + i, sum * broadcast(factor));
        }
        for (int lane = 0; lane < n; ++lane) nothing += differences[lane];
    }
    for (; i < count; ++i) {
        nothing += sums[i] - sums[i];
        sums[i] *= factor;
    }
    return nothing == T(0);
}

// One of ROWS = 1, 2, 4, 8 becomes a template argument. Types whose vectors are shorter have fewer.
#define FASTATTN_FOR_ROWS(CALL)                                \
    switch (rows) {                                            \
        case 1: CALL(1); break;                                \
        case 2: if constexpr (decode_rows_of<T> >= 2) CALL(2); break; \
        case 4: if constexpr (decode_rows_of<T> >= 4) CALL(4); break; \
        default: if constexpr (decode_rows_of<T> >= 8) CALL(8);       \
    }

template <typename T>
inline void decode_scores(int rows, T* scores, std::ptrdiff_t scores_stride, const T* q, std::ptrdiff_t q_stride,
                          const Run* runs, int n_runs, int kind, std::ptrdiff_t k_stride, std::ptrdiff_t head_dim,
                          std::ptrdiff_t v_row, std::ptrdiff_t v_bytes) {
    with_element<T>(kind, nullptr, [=](auto element) {
        with_cache([=](auto first_level) {
#define CALL(ROWS)                                                                                                 \
    dot_rows<T, ROWS, first_level()>(scores, scores_stride, q, q_stride, element, runs, n_runs, k_stride, head_dim, \
                                     v_row, v_bytes)
            FASTATTN_FOR_ROWS(CALL)
#undef CALL
        });
    });
}

template <typename T>
inline void decode_softmax(int rows, T unit, T* scores, std::ptrdiff_t n_keys, T* maximum, T* total, T* rescale) {
#define CALL(ROWS) decode_softmax_rows<T, ROWS>(unit, scores, n_keys, maximum, total, rescale)
    FASTATTN_FOR_ROWS(CALL)
#undef CALL
}

template <typename T>
inline void multiply_scores(int rows, T* scores, const T* scales, std::ptrdiff_t n_keys) {
#define CALL(ROWS) multiply_rows<T, ROWS, false>(scores, scales, n_keys)
    FASTATTN_FOR_ROWS(CALL)
#undef CALL
}

template <typename T>
inline void multiply_weights(int rows, T* weights, const T* scales, std::ptrdiff_t n_keys) {
#define CALL(ROWS) multiply_rows<T, ROWS, true>(weights, scales, n_keys)
    FASTATTN_FOR_ROWS(CALL)
#undef CALL
}

template <typename T>
inline void decode_values(int rows, T* sums, const T* weights, const Run* runs, int n_runs, int n_heads, int kind,
                          std::ptrdiff_t v_stride, std::ptrdiff_t n_features, std::ptrdiff_t later_row,
                          std::ptrdiff_t later_bytes, const T* rescale) {
    with_element<T>(kind, nullptr, [=](auto element) {
        with_cache([=](auto first_level) {
#define CALL(ROWS)                                                                                        \
    weighted_rows<T, ROWS, first_level()>(sums, weights, element, runs, runs + n_runs, n_heads, v_stride, \
                                          n_features, later_row, later_bytes, rescale)
            FASTATTN_FOR_ROWS(CALL)
#undef CALL
        });
    });
}

#undef FASTATTN_FOR_ROWS

}  // namespace
