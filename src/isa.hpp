// What this translation unit was compiled for, from compiler macros alone.
//
// Levels are whole groups of extensions, as the x86-64 psABI defines them:
//   baseline     whatever the compiler's default is (SSE2 on x86-64, NEON on AArch64)
//   avx2         x86-64-v3: AVX2, FMA, F16C, BMI
//   avx512       x86-64-v4: AVX-512 F, CD, VL, BW, DQ
//   avx512_bf16  the same and AVX512_BF16, the dot products of bfloat16 pairs
#pragma once

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "fastattn must not be compiled with fast-math options: NaN and infinity are part of its contract"
#endif

#if defined(__AVX512F__) && defined(__AVX512CD__) && defined(__AVX512VL__) && defined(__AVX512BW__) && \
    defined(__AVX512DQ__)
#if defined(__AVX512BF16__)
#define FASTATTN_ISA "avx512_bf16"
#else
#define FASTATTN_ISA "avx512"
#endif
#define FASTATTN_VECTOR_BYTES 64
// MSVC has no macros for FMA and F16C: /arch:AVX2 implies them.
#elif defined(__AVX2__) && (defined(_MSC_VER) || (defined(__FMA__) && defined(__F16C__)))
#define FASTATTN_ISA "avx2"
#define FASTATTN_VECTOR_BYTES 32
#else
#define FASTATTN_ISA "baseline"
#define FASTATTN_VECTOR_BYTES 16
#endif

#if (defined(__GNUC__) || defined(__clang__)) && !defined(FASTATTN_NO_VECTOR_EXTENSION)
#define FASTATTN_VECTOR_EXTENSION 1
#define FASTATTN_NOINLINE __attribute__((noinline))
#define FASTATTN_INLINE inline __attribute__((always_inline))
#define FASTATTN_INLINE_LAMBDA __attribute__((always_inline))
#else
#define FASTATTN_VECTOR_EXTENSION 0
#define FASTATTN_NOINLINE
#define FASTATTN_INLINE inline
#define FASTATTN_INLINE_LAMBDA
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define FASTATTN_UNROLL _Pragma("GCC unroll 32")
#define FASTATTN_UNROLL_TWICE _Pragma("GCC unroll 2")
#elif defined(__clang__)
#define FASTATTN_UNROLL _Pragma("clang loop unroll(full)")
#define FASTATTN_UNROLL_TWICE _Pragma("clang loop unroll_count(2)")
#else
#define FASTATTN_UNROLL
#define FASTATTN_UNROLL_TWICE
#endif

namespace {

constexpr const char* isa_name = FASTATTN_ISA;
constexpr int vector_bytes = FASTATTN_VECTOR_BYTES;
constexpr bool has_vector_extension = FASTATTN_VECTOR_EXTENSION;

}  // namespace
