// What this processor and operating system can run, as instruction-set levels. Built without any flags.
#pragma once

#include <initializer_list>

#if defined(__x86_64__) || defined(__i386__) || defined(_M_X64)
#define FASTATTN_X86 1
#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace {

#ifdef FASTATTN_X86

struct Registers {
    unsigned a, b, c, d;
};

inline Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r = {0, 0, 0, 0};
#if defined(_MSC_VER)
    int out[4];
    __cpuid(out, 0);
    if (unsigned(out[0]) < leaf) return r;
    __cpuidex(out, int(leaf), int(subleaf));
    r = {unsigned(out[0]), unsigned(out[1]), unsigned(out[2]), unsigned(out[3])};
#else
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
#endif
    return r;
}

// XCR0: which register state the operating system saves on a context switch.
inline unsigned long long enabled_state() {
    if (!(cpuid(1, 0).c >> 27 & 1)) return 0;  // OSXSAVE
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<unsigned long long>(high) << 32) | low;
#endif
}

inline bool bits(unsigned word, std::initializer_list<int> positions) {
    for (int position : positions)
        if (!(word >> position & 1)) return false;
    return true;
}

// 0: baseline, 1: x86-64-v3 (AVX2), 2: x86-64-v4 (AVX-512 F, CD, BW, DQ, VL), 3: that and AVX512_BF16
inline int cpu_level() {
    const unsigned long long state = enabled_state();
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
    const bool avx_state = (state & 0x6) == 0x6, avx512_state = (state & 0xe6) == 0xe6;
    const bool v3 = avx_state && bits(one.c, {12, 22, 28, 29}) &&  // FMA, MOVBE, AVX, F16C
                    bits(seven.b, {3, 5, 8});                      // BMI1, AVX2, BMI2
    if (!v3) return 0;
    const bool v4 = avx512_state && bits(seven.b, {16, 17, 28, 30, 31});  // F, DQ, CD, BW, VL
    if (!v4) return 1;
    return seven.a >= 1 && bits(cpuid(7, 1).a, {5}) ? 3 : 2;
}

// AMD's family of Zen 3 and Zen 4.
inline bool is_amd_19h() {
    const Registers vendor = cpuid(0, 0);
    const unsigned signature = cpuid(1, 0).a;
    const bool amd = vendor.b == 0x68747541 && vendor.d == 0x69746e65 && vendor.c == 0x444d4163;  // AuthenticAMD
    return amd && (signature >> 8 & 0xf) + (signature >> 20 & 0xff) == 0x19;
}

#else

inline int cpu_level() { return 0; }

#endif

}  // namespace
