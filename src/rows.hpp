// Rows of the caller's arrays, of any element kind and stride, to and from rows of the computing type.
#pragma once

#include <cmath>

#include "tiles.hpp"

namespace {

enum ElementKind : int {
    kind_float32 = 0,
    kind_float64 = 1,
    kind_float16 = 2,
    kind_bfloat16 = 3,
    kind_bool = 4,
    kind_int8 = 5,
    kind_bfloat16_pairs = 6
};

template <typename T>
constexpr int kind_of = sizeof(T) == 4 ? kind_float32 : kind_float64;

template <typename T>
constexpr int kind_of_number(const T*) {
    return kind_of<T>;
}

FASTATTN_INLINE float float_from_bits(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

FASTATTN_INLINE std::uint32_t bits_from_float(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// IEEE half to float by exponent re-biasing: normal numbers by adding 112 to the exponent, subnormal ones by
// letting the float unit normalise (value * 2**-24), infinity and NaN by a second addition.
FASTATTN_INLINE float float_from_half(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude < 0x0400u) return float_from_bits(bits_from_float(float(magnitude) * 0x1p-24f) | sign);
    return float_from_bits(((magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u)) | sign);
}

// Float to half, nearest even. The addition of a power of two 13 bits above does the rounding of normal
// numbers by carry; below 2**-14 adding 0.5 aligns the subnormal result with the float's last bits.
FASTATTN_INLINE std::uint16_t half_from_float(float x) {
    const std::uint32_t bits = bits_from_float(x);
    const std::uint16_t sign = std::uint16_t((bits >> 16) & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return std::uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x01ffu));
    if (magnitude >= 0x47800000u) return std::uint16_t(sign | 0x7c00u);
    if (magnitude < 0x38800000u)
        return std::uint16_t(sign | (bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u));
    return std::uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

FASTATTN_INLINE float float_from_bfloat16(std::uint16_t x) { return float_from_bits(std::uint32_t(x) << 16); }

FASTATTN_INLINE std::uint16_t bfloat16_from_float(float x) {
    const std::uint32_t bits = bits_from_float(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return std::uint16_t((bits >> 16) | 0x0040u);
    return std::uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The elements of arrays that are not of the computing type, as the tiles read them.
struct Float16 {
    std::uint16_t bits;
};
struct BFloat16 {
    std::uint16_t bits;
};

template <typename T>
FASTATTN_INLINE T number_of(T x) {
    return x;
}
template <typename T>
FASTATTN_INLINE T number_of(std::int8_t x) {
    return T(x);
}
template <typename T>
FASTATTN_INLINE T number_of(Float16 x) {
    return T(float_from_half(x.bits));
}
template <typename T>
FASTATTN_INLINE T number_of(BFloat16 x) {
    return T(float_from_bfloat16(x.bits));
}

// LANES elements, converted to T as they are loaded.
template <typename T>
FASTATTN_INLINE Vector<T> load_as(const T* from) {
    return load(from);
}

template <typename T>
FASTATTN_INLINE Vector<T> load_as(const std::int8_t* from) {
#if FASTATTN_VECTOR_EXTENSION
    return __builtin_convertvector(widen<T>(from), Vector<T>);
#else
    T numbers[lanes_of<T>];
    for (int lane = 0; lane < lanes_of<T>; ++lane) numbers[lane] = T(from[lane]);
    return load(numbers);
#endif
}

template <typename T>
FASTATTN_INLINE Vector<T> load_as(const Float16* from) {
#if FASTATTN_VECTOR_BYTES == 64
    return (Vector<T>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));
#elif FASTATTN_VECTOR_BYTES == 32
    return (Vector<T>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    T numbers[lanes_of<T>];
    for (int lane = 0; lane < lanes_of<T>; ++lane) numbers[lane] = number_of<T>(from[lane]);
    return load(numbers);
#endif
}

template <typename T>
FASTATTN_INLINE Vector<T> load_as(const BFloat16* from) {
#if FASTATTN_VECTOR_BYTES == 64
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i*)from));
    return (Vector<T>)_mm512_maskz_slli_epi32(0xffff, wide, 16);
#elif FASTATTN_VECTOR_BYTES == 32
    return (Vector<T>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
    T numbers[lanes_of<T>];
    for (int lane = 0; lane < lanes_of<T>; ++lane) numbers[lane] = number_of<T>(from[lane]);
    return load(numbers);
#endif
}

// call(pointer) with a pointer to the element type of this kind; kinds other than T's own go with float only.
template <typename T, typename Call>
FASTATTN_INLINE void with_element(int kind, const void* at, Call call) {
    if constexpr (sizeof(T) == 4) {
        if (kind == kind_int8) return call((const std::int8_t*)at);
        if (kind == kind_float16) return call((const Float16*)at);
        if (kind == kind_bfloat16) return call((const BFloat16*)at);
    }
    call((const T*)at);
}

template <typename T, typename From, typename Convert>
FASTATTN_INLINE void convert_row(T* __restrict to, const char* __restrict from, std::ptrdiff_t stride,
                                 std::ptrdiff_t count, Convert convert) {
    if (stride == std::ptrdiff_t(sizeof(From))) {
        for (std::ptrdiff_t i = 0; i < count; ++i) {
            From x;
            std::memcpy(&x, from + i * std::ptrdiff_t(sizeof(From)), sizeof x);
            to[i] = convert(x);
        }
    } else {
        for (std::ptrdiff_t i = 0; i < count; ++i) {
            From x;
            std::memcpy(&x, from + i * stride, sizeof x);
            to[i] = convert(x);
        }
    }
}

// A double beyond a float's range becomes the largest float, not infinity; infinities and NaN stay.
template <typename T>
FASTATTN_INLINE T narrow(double x) {
    if constexpr (sizeof(T) == 4) {
        constexpr double largest = std::numeric_limits<float>::max();
        if (x > largest && std::isfinite(x)) return float(largest);
        if (x < -largest && std::isfinite(x)) return float(-largest);
    }
    return T(x);
}

template <typename T>
inline T narrowed(double x, const T*) {
    return narrow<T>(x);
}

// 0 for a true byte, -inf for a false one.
template <typename T>
FASTATTN_INLINE T excluding_unless(std::uint8_t byte) {
    if constexpr (sizeof(T) == 4) return float_from_bits(byte ? 0u : 0xff800000u);
    return byte ? T(0) : minus_infinity<T>;
}

// to[0..count) = the row at `from`, elements `stride` bytes apart (any stride, any alignment). bfloat16 pairs are
// moved, not converted, into the first half of that.
template <typename T>
FASTATTN_NOINLINE void load_row(T* __restrict to, const char* __restrict from, std::ptrdiff_t stride,
                                std::ptrdiff_t count, int kind) {
    switch (kind) {
        case kind_float32:
            convert_row<T, float>(to, from, stride, count, [](float x) { return T(x); });
            break;
        case kind_float64:
            convert_row<T, double>(to, from, stride, count, [](double x) { return narrow<T>(x); });
            break;
        case kind_bfloat16:
            convert_row<T, std::uint16_t>(to, from, stride, count,
                                          [](std::uint16_t x) { return T(float_from_bfloat16(x)); });
            break;
        case kind_bfloat16_pairs:
            load_pairs(reinterpret_cast<char*>(to), from, stride, count);
            break;
        case kind_bool:
            convert_row<T, std::uint8_t>(to, from, stride, count,
                                         [](std::uint8_t byte) { return excluding_unless<T>(byte); });
            break;
        default:
#if defined(__F16C__)
            if constexpr (sizeof(T) == 4) {
                if (stride == 2) {
                    std::ptrdiff_t i = 0;
                    for (; i + 8 <= count; i += 8)
                        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 2 * i))));
                    to += i, from += 2 * i, count -= i;
                }
            }
#endif
            convert_row<T, std::uint16_t>(to, from, stride, count,
                                          [](std::uint16_t x) { return T(float_from_half(x)); });
    }
}

// to[0..count) = scale * the int8 codes at `from`, `stride` bytes apart.
template <typename T>
FASTATTN_NOINLINE void dequantize_row(T* __restrict to, const char* __restrict from, std::ptrdiff_t stride,
                                      std::ptrdiff_t count, T scale) {
    convert_row<T, std::int8_t>(to, from, stride, count, [scale](std::int8_t code) { return T(code) * scale; });
}

template <typename To, typename T, typename Convert>
FASTATTN_INLINE void store_converted(char* __restrict to, std::ptrdiff_t stride, const T* __restrict from,
                                     std::ptrdiff_t count, Convert convert) {
    for (std::ptrdiff_t i = 0; i < count; ++i) {
        const To x = convert(from[i]);
        std::memcpy(to + i * stride, &x, sizeof x);
    }
}

// The row at `to`, elements `stride` bytes apart, = from[0..count), rounded to nearest even.
template <typename T>
FASTATTN_NOINLINE void store_row(char* __restrict to, std::ptrdiff_t stride, const T* __restrict from,
                                 std::ptrdiff_t count, int kind) {
    switch (kind) {
        case kind_float32:
            store_converted<float>(to, stride, from, count, [](T x) { return float(x); });
            break;
        case kind_float64:
            store_converted<double>(to, stride, from, count, [](T x) { return double(x); });
            break;
        case kind_bfloat16:
            store_converted<std::uint16_t>(to, stride, from, count, [](T x) { return bfloat16_from_float(float(x)); });
            break;
        default:
            store_converted<std::uint16_t>(to, stride, from, count, [](T x) { return half_from_float(float(x)); });
    }
}

// Whether no element of rows (n_rows, n_columns), `stride` elements apart, is infinite or NaN: x - x is 0 for
// finite numbers only, and a sum of zeros stays 0.
template <typename T>
FASTATTN_NOINLINE bool all_finite(const T* rows, std::ptrdiff_t stride, std::ptrdiff_t n_rows,
                                  std::ptrdiff_t n_columns) {
    Vector<T> found[4] = {};
    T rest = 0;
    for (std::ptrdiff_t row = 0; row < n_rows; ++row) {
        const T* at = rows + row * stride;
        std::ptrdiff_t i = 0;
        for (; i + 4 * lanes_of<T> <= n_columns; i += 4 * lanes_of<T>) {
            FASTATTN_UNROLL
            for (int part = 0; part < 4; ++part) {
                const Vector<T> x = load(at + i + part * lanes_of<T>);
                found[part] = found[part] + (x - x);
            }
        }
        for (; i < n_columns; ++i) rest += at[i] - at[i];
    }
    found[0] = (found[0] + found[1]) + (found[2] + found[3]);
    for (int lane = 0; lane < lanes_of<T>; ++lane) rest += found[0][lane];
    return rest == T(0);
}

// Opaque, so that what is computed with it is rounded as with any vector: from lanes that it knows, the compiler makes
// a product and a sum of their own in some places, and a fused one in others.
template <typename T, typename Element>
FASTATTN_INLINE Vector<T> load_partial(const Element* from, std::ptrdiff_t count) {
    T numbers[lanes_of<T>] = {};
    for (std::ptrdiff_t i = 0; i < count; ++i) numbers[i] = number_of<T>(from[i]);
    return opaque<T>(load(numbers));
}

// The same by a mask where there are masks: faster, but dot_tile would be compiled into a slower form around it.
template <typename T, typename Element>
FASTATTN_INLINE Vector<T> load_masked(const Element* from, std::ptrdiff_t count) {
    if constexpr (std::is_same_v<T, Element>) return opaque<T>(load_some<T>(from, count));
    else return load_partial<T>(from, count);
}

// sums (count, at most a vector) = sums * rescale + block
template <typename T>
FASTATTN_INLINE void add_partial(T* sums, std::ptrdiff_t count, T rescale, Vector<T> block) {
    store_some<T>(sums, load_masked<T>(sums, count) * broadcast(rescale) + block, count);
}

// panel (n_columns, lanes) = the rows (`vectors` registers of them, n_columns each, contiguous) transposed and, when
// SCALED, multiplied; else they are moved as they are.
template <typename T, bool SCALED, int LANES = panel_lanes_of<T>>
FASTATTN_NOINLINE void pack_rows_of(int vectors, T* panel, const T* const* rows, std::ptrdiff_t n_columns, T factor) {
    constexpr int n = lanes_of<T>;
    const Vector<T> scale = broadcast<T>(factor);
    for (int group = 0; group < vectors * n; group += n) {
        std::ptrdiff_t column = 0;
        for (; column + n <= n_columns; column += n) {
            Vector<T> square[n];
            FASTATTN_UNROLL
            for (int i = 0; i < n; ++i) square[i] = load(rows[group + i] + column);
            transpose<T>(square);
            FASTATTN_UNROLL
            for (int i = 0; i < n; ++i)
                store(panel + (column + i) * LANES + group, SCALED ? square[i] * scale : square[i]);
        }
        for (; column < n_columns; ++column)
            for (int i = 0; i < n; ++i)
                panel[column * LANES + group + i] = SCALED ? rows[group + i][column] * factor : rows[group + i][column];
    }
}

template <typename T>
inline void pack_rows(int vectors, T* panel, const T* const* rows, std::ptrdiff_t n_columns, T factor) {
    pack_rows_of<T, true>(vectors, panel, rows, n_columns, factor);
}

template <typename T>
inline void pack_words(int vectors, T* panel, const T* const* rows, std::ptrdiff_t n_words) {
    pack_rows_of<T, false>(vectors, panel, rows, n_words, T(1));
}

// The reverse: rows[lane] (contiguous, n_rows of them are written) = factor[lane] * panel[:, lane]. Of those lanes,
// finite[lane] becomes 0 where all of the panel is finite and NaN where it is not. Returns whether all are finite.
template <typename T, int LANES = panel_lanes_of<T>>
FASTATTN_NOINLINE bool unpack_rows(T* const* rows, int n_rows, const T* panel, std::ptrdiff_t n_columns,
                                   const T* factor, T* finite) {
    constexpr int n = lanes_of<T>;
    const Vector<T> zero = broadcast<T>(T(0)), one = broadcast<T>(T(1));
    bool all = true;
    for (int group = 0; group < LANES && group < n_rows; group += n) {
        const Vector<T> scale = load(factor + group);
        Vector<T> found[4] = {};        // some, so that not every addition waits for the one before
        std::ptrdiff_t column = 0;
        for (; column + n <= n_columns; column += n) {
            Vector<T> square[n];
            FASTATTN_UNROLL
            for (int i = 0; i < n; ++i) {
                square[i] = load(panel + (column + i) * LANES + group);
                found[i % 4] = square[i] * zero + found[i % 4];
                square[i] = square[i] * scale;
            }
            transpose<T>(square);
            FASTATTN_UNROLL
            for (int i = 0; i < n; ++i)
                if (group + i < n_rows) store(rows[group + i] + column, square[i]);
        }
        for (; column < n_columns; ++column) {
            found[0] = load(panel + column * LANES + group) * zero + found[0];
            for (int i = 0; i < n && group + i < n_rows; ++i)
                rows[group + i][column] = panel[column * LANES + group + i] * factor[group + i];
        }
        found[0] = (found[0] + found[1]) + (found[2] + found[3]);
        store(finite + group, found[0]);
        all &= !any_of<T>(bits_of<T>(select<T>(found[0] == zero, zero, one)));
    }
    return all;
}

}  // namespace
