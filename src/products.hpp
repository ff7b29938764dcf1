// What a score tile multiplies and adds: features one by one, or pairs of bfloat16 features.
//
// A *word* is what one lane of the tile takes at a time: a feature in the computing type, or two neighbouring
// bfloat16 features in the 32 bits of a float, the first in the lower half, 0 after an odd last one. Products of
// bfloat16 numbers are exact in float32, so pairs lose nothing against converted features.
//
// vdpbf16ps takes subnormal inputs as 0 and flushes subnormal sums. A flushed sum is off by less than 2^-126, which
// no weight notices; a flushed input can be off by 2^-126 times the largest float, so queries and keys that hold
// subnormal numbers are multiplied by SplitPairs instead: in the same order, rounded at the same places.
#pragma once

#include "vector.hpp"

#if FASTATTN_VECTOR_EXTENSION && defined(__AVX512BF16__)
#include <immintrin.h>
#define FASTATTN_PAIR_PRODUCTS 1
#else
#define FASTATTN_PAIR_PRODUCTS 0
#endif

namespace {

constexpr bool has_pair_products = FASTATTN_PAIR_PRODUCTS;

enum ProductKind : int { product_features = 0, product_pairs = 1, product_split_pairs = 2 };

template <typename T>
struct Features {
    static FASTATTN_INLINE Vector<T> word(const T* key) { return broadcast(*key); }
    static FASTATTN_INLINE Vector<T> add(Vector<T> sum, Vector<T> key, Vector<T> query) { return sum + key * query; }
};

#if FASTATTN_PAIR_PRODUCTS

struct Pairs {
    // Not broadcast(), which is arithmetic on floats: the bits of two numbers may look like a signalling NaN.
    static FASTATTN_INLINE Vector<float> word(const float* key) {
        std::int32_t bits;
        std::memcpy(&bits, key, sizeof bits);
        return (Vector<float>)_mm512_set1_epi32(bits);
    }
    static FASTATTN_INLINE Vector<float> add(Vector<float> sum, Vector<float> key, Vector<float> query) {
        return _mm512_dpbf16_ps(sum, (__m512bh)key, (__m512bh)query);
    }
};

struct SplitPairs : Pairs {
    static FASTATTN_INLINE Vector<float> first(Vector<float> pair) {
        return from_bits<float>(bits_of<float>(pair) << 16);
    }
    static FASTATTN_INLINE Vector<float> second(Vector<float> pair) {
        return from_bits<float>(bits_of<float>(pair) & std::int32_t(0xffff0000u));
    }
    static FASTATTN_INLINE Vector<float> add(Vector<float> sum, Vector<float> key, Vector<float> query) {
        sum = sum + second(key) * second(query);
        return sum + first(key) * first(query);
    }
};

#endif

// words ((count + 1) / 2) = the row of `count` bfloat16 numbers at `from`, `stride` bytes apart, in pairs.
inline void load_pairs(char* __restrict words, const char* __restrict from, std::ptrdiff_t stride,
                       std::ptrdiff_t count) {
    if (stride == 2)
        std::memcpy(words, from, std::size_t(2 * count));
    else
        for (std::ptrdiff_t i = 0; i < count; ++i) std::memcpy(words + 2 * i, from + i * stride, 2);
    if (count % 2) std::memset(words + 2 * count, 0, 2);
}

// Whether one of the bfloat16 pairs of rows (n_rows, n_words), `stride` words apart, holds a subnormal number.
template <typename T>
FASTATTN_NOINLINE bool any_subnormal_pair(const T* rows, std::ptrdiff_t stride, std::ptrdiff_t n_rows,
                                          std::ptrdiff_t n_words) {
    std::uint16_t found = 0;
    for (std::ptrdiff_t row = 0; row < n_rows; ++row) {
        const char* at = reinterpret_cast<const char*>(rows + row * stride);
        for (std::ptrdiff_t i = 0; i < 2 * n_words; ++i) {
            std::uint16_t x;
            std::memcpy(&x, at + 2 * i, sizeof x);
            found |= std::uint16_t((x & 0x7fffu) - 1u) < 0x7fu;  // magnitude 1 to 0x7f: exponent 0 and not zero
        }
    }
    return found != 0;
}

}  // namespace
