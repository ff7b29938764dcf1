// 2**x for x <= 0 with the numbers of two registers as a table: AVX-512, where one instruction looks lanes up in it.
#pragma once

#include "vector.hpp"

namespace {

// The exponent is m + f with m the nearest multiple of one over the table's size. Adding `magic` leaves m + bias in the
// low bits of the sum: m's fraction, which is the place in the table, and above it the exponent of the power of two.
// Shifted, so that the exponent is where it belongs, and the place below it, these bits become those of 2**m when
// the table's number is added: the mantissa of 2**fraction, less what the place is there.
// The polynomials (constant term 1, so 2**0 is exactly 1) have small relative errors, found by search and exchange:
//   float   degree 2 on [-1/64, 1/64],   5.3e-8;   double   degree 6 on [-1/32, 1/32],   8.4e-18.
// Range: exponents in [-inf, 0]; where x is less than `lowest`, the exponent of the smallest normal number, the result
// is 0; NaN is not less and stays NaN, with any payload, because f is NaN and 2**m is multiplied by it. Nothing on the
// way is subnormal, which some processors are slow at.
// Measured in the way of tests/test_exponential.py: at most 1.73 ulp (float) and 1.10 ulp (double).
template <typename T>
struct exponential_constants;

template <>
struct exponential_constants<float> {
    static constexpr int degree = 2, shift = 18;
    static constexpr float magic = 393216.0f + 127.0f;  // 1.5 * 2**shift + exponent bias
    static constexpr float lowest = -126.0f;
    static constexpr float coefficients[degree] = {0.6931573152542114f, 0.24022649228572845f};
    alignas(64) static constexpr std::int32_t table[32] = {
        0x0,      -0x13279, -0x2553d, -0x367f1, -0x46a3e, -0x55bc6, -0x63c2d, -0x70b10, -0x7c810, -0x872c6, -0x90ace,
        -0x98fbd, -0xa0129, -0xa5ea5, -0xaa7c1, -0xadc0a, -0xafb0d, -0xb0451, -0xaf75c, -0xad3b3, -0xa98d6, -0xa4642,
        -0x9db74, -0x957e2, -0x8bb03, -0x80448, -0x73321, -0x646f9, -0x53f39, -0x41b46, -0x2da83, -0x17c4d};
};

template <>
struct exponential_constants<double> {
    static constexpr int degree = 6, shift = 48;
    static constexpr double magic = 422212465065984.0 + 1023.0;  // 1.5 * 2**shift + exponent bias
    static constexpr double lowest = -1022.0;
    static constexpr double coefficients[degree] = {0.6931471805599471188,   0.2402265069591008691,
                                                    0.05550410865073288871,  0.009618129106407787806,
                                                    0.001333383239507692215, 0.0001540376801132116152};
    alignas(64) static constexpr std::int64_t table[16] = {
        0x0,              -0x4aa7930676f1,  -0x8d47c382ae85,  -0xc785918a9dc8,  -0xf901f5ce48eb,  -0x12159b3edcbde,
        -0x140252ac9d5d9, -0x154f822b7abd7, -0x15f619980c433, -0x15eeb8c14fe79, -0x1531abdd55f25, -0x13b6e7d5c0f70,
        -0x1176066a52c53, -0xe664227aad64,  -0xa7e723045b79,  -0x5b505d5b6f26};
};

FASTATTN_INLINE __m512i look_up(const std::int32_t* table, __m512i places) {
    return _mm512_permutex2var_epi32(_mm512_load_si512(table), places, _mm512_load_si512(table + 16));
}

FASTATTN_INLINE __m512i look_up(const std::int64_t* table, __m512i places) {
    return _mm512_permutex2var_epi64(_mm512_load_si512(table), places, _mm512_load_si512(table + 8));
}

// power + power * growth, but 0 where x is less than `lowest`
FASTATTN_INLINE Vector<float> grow(Vector<float> power, Vector<float> growth, Vector<float> x, Vector<float> lowest) {
    return _mm512_maskz_fmadd_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ), power, growth, power);
}

FASTATTN_INLINE Vector<double> grow(Vector<double> power, Vector<double> growth, Vector<double> x,
                                    Vector<double> lowest) {
    return _mm512_maskz_fmadd_pd(_mm512_cmp_pd_mask(x, lowest, _CMP_NLT_UQ), power, growth, power);
}

// See exponential.hpp.
template <typename T, int COUNT>
FASTATTN_INLINE void exp2_nonpositive(Vector<T> (&x)[COUNT], Vector<T> unit, Vector<T> lowest) {
    using constants = exponential_constants<T>;
    const Vector<T> magic = broadcast<T>(constants::magic);
    Vector<T> shifted[COUNT], fraction[COUNT], power[COUNT], polynomial[COUNT];
    FASTATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) shifted[i] = x[i] * unit + magic;
    FASTATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) {
        fraction[i] = x[i] * unit - (shifted[i] - magic);
        power[i] = from_bits<T>((bits_of<T>(shifted[i]) << constants::shift)
                                + (IntegerVector<T>)look_up(constants::table, (__m512i)shifted[i]));
        polynomial[i] = broadcast<T>(constants::coefficients[constants::degree - 1]);
    }
    FASTATTN_UNROLL
    for (int degree = constants::degree - 2; degree >= 0; --degree) {
        FASTATTN_UNROLL
        for (int i = 0; i < COUNT; ++i)
            polynomial[i] = polynomial[i] * fraction[i] + broadcast<T>(constants::coefficients[degree]);
    }
    FASTATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) x[i] = grow(power[i], polynomial[i] * fraction[i], x[i], lowest);
}

}  // namespace
