// 2**x for x <= 0, and tanh.
#pragma once

#include "isa.hpp"

// exp2_nonpositive(x, unit, lowest) makes 2**(x * unit) of each x; both of its products are fused multiply-adds where
// there are any. Several registers go stage by stage, so that independent instructions are neighbours.
#if FASTATTN_VECTOR_BYTES == 64 && FASTATTN_VECTOR_EXTENSION
#include "power_table.hpp"
#else
#include "power_polynomial.hpp"
#endif

namespace {

// The x whose exponent x * unit is the last that counts: see `lowest` above; unit and 1 / unit are at most 1e36
// (double: 1e300).
template <typename T>
FASTATTN_INLINE Vector<T> lowest_exponent(T unit) {
    return opaque<T>(broadcast<T>(exponential_constants<T>::lowest / unit));
}

template <typename T>
FASTATTN_INLINE Vector<T> exp2_nonpositive(Vector<T> x, T unit) {
    Vector<T> one[1] = {x};
    exp2_nonpositive<T, 1>(one, broadcast<T>(unit), lowest_exponent<T>(unit));
    return one[0];
}

template <typename T>
FASTATTN_INLINE Vector<T> absolute(Vector<T> x) {
    return larger<T>(x, broadcast<T>(T(0)) - x);
}

// tanh. Small arguments: the odd polynomial (float) or rational (double) of the Cephes library, |x| < 0.625;
// beyond, 1 - 2 / (exp(2|x|) + 1) with exp(2|x|) taken as 1 / 2**(-2|x| log2 e), which cannot overflow.
template <typename T>
FASTATTN_INLINE Vector<T> tanh_small(Vector<T> x, Vector<T> z);

template <>
FASTATTN_INLINE Vector<float> tanh_small<float>(Vector<float> x, Vector<float> z) {
    Vector<float> p = broadcast(-5.70498872745e-3f);
    p = p * z + broadcast(2.06390887954e-2f);
    p = p * z + broadcast(-5.37397155531e-2f);
    p = p * z + broadcast(1.33314422036e-1f);
    p = p * z + broadcast(-3.33332819422e-1f);
    return x + x * z * p;
}

template <>
FASTATTN_INLINE Vector<double> tanh_small<double>(Vector<double> x, Vector<double> z) {
    Vector<double> p = broadcast(-9.64399179425052238628e-1);
    p = p * z + broadcast(-9.92877231001918586564e1);
    p = p * z + broadcast(-1.61468768441708447952e3);
    Vector<double> q = z + broadcast(1.12811678491632931402e2);
    q = q * z + broadcast(2.23548839060100448583e3);
    q = q * z + broadcast(4.84406305325125486048e3);
    return x + x * z * (p / q);
}

template <typename T>
FASTATTN_INLINE Vector<T> tanh_of(Vector<T> x) {
    const Vector<T> one = broadcast<T>(T(1)), zero = broadcast<T>(T(0));
    const Vector<T> size = absolute<T>(x);
    const Vector<T> decay = exp2_nonpositive<T>(zero - size, T(2.885390081777926815));  // exp(-2|x|)
    const Vector<T> saturated = (one - decay) / (one + decay);
    const Vector<T> signed_saturated = select<T>(x < zero, zero - saturated, saturated);
    return select<T>(size < broadcast<T>(T(0.625)), tanh_small<T>(x, x * x), signed_saturated);
}

}  // namespace
