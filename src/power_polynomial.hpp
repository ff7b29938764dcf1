// 2**x for x <= 0 by a polynomial: every level but AVX-512, whose registers hold a table.
#pragma once

#include "vector.hpp"

namespace {

// The exponent is n + f with n the nearest integer and |f| <= 1/2. Adding `magic` leaves n + bias in the low bits of
// the sum, so that a shift makes the power of two. The polynomials (constant term 1, so 2**0 is exactly 1) are
// minimax in relative error on [-1/2, 1/2], found by the Remez exchange:
//   float   degree 5,   9.2e-8;   double   degree 11,   3.4e-18.
// Range: exponents in [-inf, 0]; below the smallest normal one the result is 0, because x is raised to the `lowest`
// whose power of two has all bits clear; -inf gives 0; NaN stays NaN, with any payload, because the maximum passes
// its second operand on and the power of two is multiplied and not added to the bits.
// Measured by tests/test_exponential.py: at most 2.2 ulp (float) and 1.1 ulp (double) with fused multiply-adds; without
// them the exponent itself is rounded, as NumPy rounds a scaled score.
template <typename T>
struct exponential_constants;

template <>
struct exponential_constants<float> {
    static constexpr int degree = 5, mantissa_bits = 23;
    static constexpr float magic = 12582912.0f + 127.0f;  // 1.5 * 2**23 + exponent bias
    static constexpr float lowest = -127.0f;
    static constexpr float coefficients[degree] = {0.6931469775989920f, 0.2402224208537671f, 0.05550733743470085f,
                                                   0.009671512639956455f, 0.001326472714007201f};
};

template <>
struct exponential_constants<double> {
    static constexpr int degree = 11, mantissa_bits = 52;
    static constexpr double magic = 6755399441055744.0 + 1023.0;  // 1.5 * 2**52 + exponent bias
    static constexpr double lowest = -1023.0;
    static constexpr double coefficients[degree] = {
        0.6931471805599453258,   0.2402265069591013126,    0.05550410866482008323, 0.00961812910759412009,
        0.001333355814677462052, 0.0001540353045711209086, 1.525273349312748935e-5, 1.3215435282308488e-6,
        1.017819957184213797e-7, 7.073783248503133299e-9,  4.434771298200376708e-10};
};

// See exponential.hpp.
template <typename T, int COUNT>
FASTATTN_INLINE void exp2_nonpositive(Vector<T> (&x)[COUNT], Vector<T> unit, Vector<T> lowest) {
    using constants = exponential_constants<T>;
    const Vector<T> magic = broadcast<T>(constants::magic);
    Vector<T> shifted[COUNT], polynomial[COUNT];
    FASTATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) {
        x[i] = larger<T>(lowest, x[i]);
        shifted[i] = x[i] * unit + magic;
    }
    FASTATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) {
        x[i] = x[i] * unit - (shifted[i] - magic);
        polynomial[i] = broadcast<T>(constants::coefficients[constants::degree - 1]);
    }
    FASTATTN_UNROLL
    for (int degree = constants::degree - 2; degree >= 0; --degree) {
        FASTATTN_UNROLL
        for (int i = 0; i < COUNT; ++i)
            polynomial[i] = polynomial[i] * x[i] + broadcast<T>(constants::coefficients[degree]);
    }
    FASTATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) {
        polynomial[i] = polynomial[i] * x[i] + broadcast<T>(T(1));
        x[i] = polynomial[i] * from_bits<T>(bits_of<T>(shifted[i]) << constants::mantissa_bits);
    }
}

}  // namespace
