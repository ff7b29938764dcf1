// Boolean masks that are read as bytes, one row a lane: looked through, and transposed to (key, lane).
#pragma once

#include "tiles.hpp"

namespace {

// What some bytes of a mask hold.
constexpr int some_visible = 1, some_hidden = 2;

FASTATTN_INLINE int look_through_row(const char* row, std::ptrdiff_t n_keys) {
    constexpr std::uint64_t low_bits = 0x0101010101010101u, high_bits = 0x8080808080808080u;
    std::uint64_t any = 0, zero = 0;    // zero: a byte is 0 just where taking 1 from it borrows
    std::ptrdiff_t key = 0;
    for (; key + 8 <= n_keys; key += 8) {
        std::uint64_t bytes;
        std::memcpy(&bytes, row + key, sizeof bytes);
        any |= bytes;
        zero |= (bytes - low_bits) & ~bytes & high_bits;
    }
    for (; key < n_keys; ++key) {
        any |= std::uint64_t(row[key] != 0);
        zero |= std::uint64_t(row[key] == 0);
    }
    return (any ? some_visible : 0) | (zero ? some_hidden : 0);
}

// Looks no further than needed to find both.
inline int look_through(const char* const* rows, int n_rows, std::ptrdiff_t n_keys) {
    int found = 0;
    for (int i = 0; i < n_rows && found != (some_visible | some_hidden); ++i)
        if (i == 0 || rows[i] != rows[i - 1]) found |= look_through_row(rows[i], n_keys);
    return found;
}

#if FASTATTN_VECTOR_EXTENSION

typedef std::int8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));

FASTATTN_INLINE Bytes interleave_low(Bytes a, Bytes b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
    return __builtin_shuffle(a, b, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
#endif
}

FASTATTN_INLINE Bytes interleave_high(Bytes a, Bytes b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
    return __builtin_shuffle(a, b, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#endif
}

// Interleaving the first half of the rows with the second turns each byte's index (row, column) one bit further; after
// four such turns rows and columns have changed places.
FASTATTN_INLINE void transpose_bytes(Bytes (&square)[16]) {
    FASTATTN_UNROLL
    for (int turn = 0; turn < 4; ++turn) {
        Bytes turned[16];
        FASTATTN_UNROLL
        for (int i = 0; i < 8; ++i) {
            turned[2 * i] = interleave_low(square[i], square[i + 8]);
            turned[2 * i + 1] = interleave_high(square[i], square[i + 8]);
        }
        FASTATTN_UNROLL
        for (int i = 0; i < 16; ++i) square[i] = turned[i];
    }
}

// A square is 16 rows of 16 keys; with fewer lanes than 16 it is `parts` runs of 16 keys of each lane.
template <int LANES>
FASTATTN_INLINE std::ptrdiff_t transpose_squares(std::int8_t* hidden, const char* const* rows, std::ptrdiff_t n_keys) {
    constexpr int width = LANES < 16 ? LANES : 16, parts = 16 / width;
    std::ptrdiff_t key = 0;
    for (; key + 16 * parts <= n_keys; key += 16 * parts) {
        for (int group = 0; group < LANES; group += width) {
            Bytes square[16];
            FASTATTN_UNROLL
            for (int i = 0; i < 16; ++i) square[i] = *(const Bytes*)(rows[group + i % width] + key + i / width * 16);
            transpose_bytes(square);
            FASTATTN_UNROLL
            for (int i = 0; i < 16; ++i) {
                const Bytes found = square[i] == Bytes{};
                for (int part = 0; part < parts; ++part)
                    std::memcpy(hidden + (key + part * 16 + i) * LANES + group,
                                (const std::int8_t*)&found + part * width, width);
            }
        }
    }
    return key;
}

#else

template <int LANES>
inline std::ptrdiff_t transpose_squares(std::int8_t*, const char* const*, std::ptrdiff_t) {
    return 0;
}

#endif

// hidden (n_keys, lanes) = -1 where the lane's row has a zero byte, else 0. `kind` gives the number of lanes.
template <typename T>
FASTATTN_NOINLINE void transpose_mask(std::int8_t* hidden, const char* const* rows, std::ptrdiff_t n_keys, const T*) {
    constexpr int lanes = panel_lanes_of<T>;
    for (std::ptrdiff_t key = transpose_squares<lanes>(hidden, rows, n_keys); key < n_keys; ++key)
        for (int lane = 0; lane < lanes; ++lane) hidden[key * lanes + lane] = rows[lane][key] ? 0 : -1;
}

// scores (n_keys, lanes) become -inf where they are hidden; maximum (lanes) is raised to the largest that remains.
template <typename T>
FASTATTN_NOINLINE void exclude_hidden(T* scores, const std::int8_t* hidden, std::ptrdiff_t n_keys, T* maximum) {
    constexpr int n = lanes_of<T>, lanes = panel_lanes_of<T>;
    const Vector<T> lowest = broadcast<T>(minus_infinity<T>);
    Vector<T> top[panel_vectors];
    FASTATTN_UNROLL
    for (int c = 0; c < panel_vectors; ++c) top[c] = load(maximum + c * n);
    for (std::ptrdiff_t key = 0; key < n_keys; ++key) {
        FASTATTN_UNROLL
        for (int c = 0; c < panel_vectors; ++c) {
            T* at = scores + key * lanes + c * n;
            const Vector<T> score = select_negative<T>(widen<T>(hidden + key * lanes + c * n), lowest, load(at));
            store(at, score);
            top[c] = larger<T>(score, top[c]);
        }
    }
    FASTATTN_UNROLL
    for (int c = 0; c < panel_vectors; ++c) store(maximum + c * n, top[c]);
}

// bias = -inf where hidden, else 0.
template <typename T>
inline void expand_hidden(T* bias, const std::int8_t* hidden, std::ptrdiff_t count) {
    for (std::ptrdiff_t i = 0; i < count; ++i) bias[i] = hidden[i] ? minus_infinity<T> : T(0);
}

}  // namespace
