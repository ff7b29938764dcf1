// One SIMD register as a value type: load, store, arithmetic, select, transpose.
//
// With GCC and Clang it is the compiler's vector extension, so one source serves SSE2, AVX2, AVX-512 and
// NEON. Elsewhere (MSVC) a struct of plain loops has the same operators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "isa.hpp"

#if FASTATTN_VECTOR_BYTES > 16 || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

template <typename T>
constexpr int lanes_of = vector_bytes / int(sizeof(T));

template <typename T>
struct integer_of;
template <>
struct integer_of<float> {
    using type = std::int32_t;
};
template <>
struct integer_of<double> {
    using type = std::int64_t;
};

#if FASTATTN_VECTOR_EXTENSION

template <typename T>
struct vector_of {
    typedef T type __attribute__((vector_size(vector_bytes)));
    typedef typename integer_of<T>::type integer __attribute__((vector_size(vector_bytes)));
};
template <typename T>
using Vector = typename vector_of<T>::type;
template <typename T>
using IntegerVector = typename vector_of<T>::integer;

template <typename T>
FASTATTN_INLINE Vector<T> select(IntegerVector<T> condition, Vector<T> yes, Vector<T> no) {
    return condition ? yes : no;
}

template <typename T>
FASTATTN_INLINE IntegerVector<T> bits_of(Vector<T> x) {
    return (IntegerVector<T>)x;
}

template <typename T>
FASTATTN_INLINE Vector<T> from_bits(IntegerVector<T> x) {
    return (Vector<T>)x;
}

// Where the condition's sign bit is set, yes: one blend on AVX2.
template <typename T>
FASTATTN_INLINE Vector<T> select_negative(IntegerVector<T> condition, Vector<T> yes, Vector<T> no) {
    return condition < 0 ? yes : no;
}

// (a > b) ? a : b in this order is one max instruction on x86: b when either is NaN.
template <typename T>
FASTATTN_INLINE Vector<T> larger(Vector<T> a, Vector<T> b) {
    return a > b ? a : b;
}

#else

template <typename T>
struct IntegerLanes {
    typename integer_of<T>::type x[lanes_of<T>];
};
template <typename T>
struct Vector {
    T x[lanes_of<T>];
    T& operator[](int lane) { return x[lane]; }
    T operator[](int lane) const { return x[lane]; }
};
template <typename T>
using IntegerVector = IntegerLanes<T>;

#define FASTATTN_ARITHMETIC(OP)                                                        \
    template <typename T>                                                              \
    inline Vector<T> operator OP(const Vector<T>& a, const Vector<T>& b) {             \
        Vector<T> r;                                                                   \
        for (int i = 0; i < lanes_of<T>; ++i) r.x[i] = a.x[i] OP b.x[i];               \
        return r;                                                                      \
    }
#define FASTATTN_COMPARISON(OP)                                                        \
    template <typename T>                                                              \
    inline IntegerLanes<T> operator OP(const Vector<T>& a, const Vector<T>& b) {       \
        IntegerLanes<T> r;                                                             \
        for (int i = 0; i < lanes_of<T>; ++i) r.x[i] = a.x[i] OP b.x[i] ? -1 : 0;      \
        return r;                                                                      \
    }
#define FASTATTN_BITWISE(OP)                                                           \
    template <typename T>                                                              \
    inline IntegerLanes<T> operator OP(const IntegerLanes<T>& a, const IntegerLanes<T>& b) { \
        IntegerLanes<T> r;                                                             \
        for (int i = 0; i < lanes_of<T>; ++i) r.x[i] = a.x[i] OP b.x[i];               \
        return r;                                                                      \
    }
FASTATTN_ARITHMETIC(+)
FASTATTN_ARITHMETIC(-)
FASTATTN_ARITHMETIC(*)
FASTATTN_ARITHMETIC(/)
FASTATTN_COMPARISON(<)
FASTATTN_COMPARISON(>)
FASTATTN_COMPARISON(<=)
FASTATTN_COMPARISON(>=)
FASTATTN_COMPARISON(==)
FASTATTN_BITWISE(&)
FASTATTN_BITWISE(|)
#undef FASTATTN_ARITHMETIC
#undef FASTATTN_COMPARISON
#undef FASTATTN_BITWISE

template <typename T>
inline IntegerLanes<T> operator<<(const IntegerLanes<T>& a, int shift) {
    IntegerLanes<T> r;
    for (int i = 0; i < lanes_of<T>; ++i)
        r.x[i] = typename integer_of<T>::type(std::uint64_t(a.x[i]) << shift);
    return r;
}

template <typename T>
inline Vector<T> select(const IntegerVector<T>& condition, const Vector<T>& yes, const Vector<T>& no) {
    Vector<T> r;
    for (int i = 0; i < lanes_of<T>; ++i) r.x[i] = condition.x[i] ? yes.x[i] : no.x[i];
    return r;
}

template <typename T>
inline Vector<T> select_negative(const IntegerVector<T>& condition, const Vector<T>& yes, const Vector<T>& no) {
    return select<T>(condition, yes, no);
}

template <typename T>
inline IntegerVector<T> bits_of(const Vector<T>& x) {
    IntegerVector<T> r;
    std::memcpy(&r, &x, sizeof r);
    return r;
}

template <typename T>
inline Vector<T> from_bits(const IntegerVector<T>& x) {
    Vector<T> r;
    std::memcpy(&r, &x, sizeof r);
    return r;
}

template <typename T>
inline Vector<T> larger(const Vector<T>& a, const Vector<T>& b) {
    return select<T>(a > b, a, b);
}

#endif

// Loads and stores of any alignment. With memcpy instead, gcc 12 sends registers through the stack.
#if FASTATTN_VECTOR_EXTENSION
template <typename T>
struct unaligned_of {
    typedef T type __attribute__((vector_size(vector_bytes), aligned(alignof(T)), may_alias));
};

template <typename T>
FASTATTN_INLINE Vector<T> load(const T* from) {
    return *(const typename unaligned_of<T>::type*)from;
}

template <typename T>
FASTATTN_INLINE void store(T* to, Vector<T> x) {
    *(typename unaligned_of<T>::type*)to = x;
}

// Whether some lane's comparison holds.
template <typename T>
FASTATTN_INLINE bool any_of(IntegerVector<T> comparison) {
#if FASTATTN_VECTOR_BYTES == 64
    return _mm512_test_epi64_mask((__m512i)comparison, (__m512i)comparison) != 0;
#elif FASTATTN_VECTOR_BYTES == 32
    return !_mm256_testz_si256((__m256i)comparison, (__m256i)comparison);
#elif FASTATTN_VECTOR_BYTES == 16 && defined(__SSE2__)
    return _mm_movemask_epi8((__m128i)comparison) != 0;
#else
    std::uint64_t parts[vector_bytes / 8], all = 0;
    std::memcpy(parts, &comparison, sizeof parts);
    for (std::uint64_t part : parts) all |= part;
    return all != 0;
#endif
}

// Bytes to the integers of a register, with their signs. gcc 12 makes of __builtin_convertvector one move a byte.
template <typename T>
FASTATTN_INLINE IntegerVector<T> widen(const std::int8_t* from) {
#if FASTATTN_VECTOR_BYTES == 64
    // Masked by all ones: gcc 12 warns of an uninitialised register in the forms without a mask.
    if constexpr (sizeof(T) == 4)
        return (IntegerVector<T>)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from));
    return (IntegerVector<T>)_mm512_maskz_cvtepi8_epi64(0xff, _mm_loadl_epi64((const __m128i*)from));
#elif FASTATTN_VECTOR_BYTES == 32
    if constexpr (sizeof(T) == 4) return (IntegerVector<T>)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
    int bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return (IntegerVector<T>)_mm256_cvtepi8_epi64(_mm_cvtsi32_si128(bytes));
#else
#if defined(__SSE2__)
    if constexpr (sizeof(T) == 4) {
        int bytes;
        std::memcpy(&bytes, from, sizeof bytes);
        __m128i x = _mm_cvtsi32_si128(bytes);
        x = _mm_unpacklo_epi8(x, x);    // each byte four times; the shift spreads the sign of the highest
        return (IntegerVector<T>)_mm_srai_epi32(_mm_unpacklo_epi16(x, x), 24);
    }
#endif
    IntegerVector<T> integers;
    for (int i = 0; i < lanes_of<T>; ++i) integers[i] = from[i];
    return integers;
#endif
}
#else
template <typename T>
inline Vector<T> load(const T* from) {
    Vector<T> r;
    std::memcpy(&r, from, sizeof r);
    return r;
}

template <typename T>
inline void store(T* to, const Vector<T>& x) {
    std::memcpy(to, &x, sizeof x);
}

template <typename T>
inline bool any_of(const IntegerVector<T>& comparison) {
    for (int i = 0; i < lanes_of<T>; ++i)
        if (comparison.x[i]) return true;
    return false;
}

template <typename T>
inline IntegerVector<T> widen(const std::int8_t* from) {
    IntegerVector<T> r;
    for (int i = 0; i < lanes_of<T>; ++i) r.x[i] = from[i];
    return r;
}
#endif

// The first `count` lanes, all at most; the others are 0.
template <typename T>
FASTATTN_INLINE Vector<T> load_some(const T* from, std::ptrdiff_t count) {
#if FASTATTN_VECTOR_EXTENSION && FASTATTN_VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4) return (Vector<T>)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
    else return (Vector<T>)_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), from);
#else
    T lanes[lanes_of<T>] = {};
    for (std::ptrdiff_t i = 0; i < count; ++i) lanes[i] = from[i];
    return load(lanes);
#endif
}

template <typename T>
FASTATTN_INLINE void store_some(T* to, Vector<T> x, std::ptrdiff_t count) {
#if FASTATTN_VECTOR_EXTENSION && FASTATTN_VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)x);
    else _mm512_mask_storeu_pd(to, __mmask8((1u << count) - 1), (__m512d)x);
#else
    for (std::ptrdiff_t i = 0; i < count; ++i) to[i] = x[int(i)];
#endif
}

template <typename T>
FASTATTN_INLINE Vector<T> broadcast(T x) {
#if FASTATTN_VECTOR_EXTENSION
    return x - Vector<T>{};
#else
    Vector<T> r;
    for (int i = 0; i < lanes_of<T>; ++i) r.x[i] = x;
    return r;
#endif
}

// x, unknown to the optimiser: a maximum against a constant would become a comparison and a blend.
template <typename T>
FASTATTN_INLINE Vector<T> opaque(Vector<T> x) {
#if FASTATTN_VECTOR_EXTENSION && (defined(__x86_64__) || defined(__i386__))
    __asm__("" : "+x"(x));
#elif FASTATTN_VECTOR_EXTENSION && defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

// ---- transposition of a LANES x LANES square held in LANES registers: log2(LANES) stages of two-source
// shuffles, each exchanging the off-diagonal halves of blocks of 2*HALF.

#if FASTATTN_VECTOR_EXTENSION

#if defined(__clang__)
template <typename T, int HALF, bool UPPER, std::size_t... LANE>
FASTATTN_INLINE Vector<T> exchange(Vector<T> a, Vector<T> b, std::index_sequence<LANE...>) {
    constexpr int n = lanes_of<T>;
    return __builtin_shufflevector(
        a, b, ((int(LANE) & HALF) ? n + int(LANE) - (UPPER ? 0 : HALF) : int(LANE) + (UPPER ? HALF : 0))...);
}
#else
template <typename T, int HALF, bool UPPER, std::size_t... LANE>
FASTATTN_INLINE Vector<T> exchange(Vector<T> a, Vector<T> b, std::index_sequence<LANE...>) {
    constexpr int n = lanes_of<T>;
    return __builtin_shuffle(
        a, b,
        IntegerVector<T>{
            ((int(LANE) & HALF) ? n + int(LANE) - (UPPER ? 0 : HALF) : int(LANE) + (UPPER ? HALF : 0))...});
}
#endif

template <typename T, int HALF>
FASTATTN_INLINE void transpose_stages(Vector<T> (&rows)[lanes_of<T>]) {
    if constexpr (HALF > 0) {
        constexpr auto all = std::make_index_sequence<std::size_t(lanes_of<T>)>{};
        FASTATTN_UNROLL
        for (int i = 0; i < lanes_of<T>; ++i) {
            if (i & HALF) continue;
            const Vector<T> a = rows[i], b = rows[i + HALF];
            rows[i] = exchange<T, HALF, false>(a, b, all);
            rows[i + HALF] = exchange<T, HALF, true>(a, b, all);
        }
        transpose_stages<T, HALF / 2>(rows);
    }
}

template <typename T>
FASTATTN_INLINE void transpose(Vector<T> (&rows)[lanes_of<T>]) {
    transpose_stages<T, lanes_of<T> / 2>(rows);
}

#else

template <typename T>
inline void transpose(Vector<T> (&rows)[lanes_of<T>]) {
    for (int i = 0; i < lanes_of<T>; ++i)
        for (int j = 0; j < i; ++j) std::swap(rows[i].x[j], rows[j].x[i]);
}

#endif

}  // namespace
