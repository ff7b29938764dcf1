// Bringing memory nearer before it is read.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cpu.hpp"
#include "isa.hpp"

namespace {

// Processors with vectors of 64 bytes ask for many lines at once. They are kept asking: a block's values come nearer
// while its keys are read, and the next block's keys while its values are summed. Shorter vectors: docs/design.md.
constexpr bool crosswise = vector_bytes == 64;

// Crosswise into the first-level cache, but into the second-level one on Zen 4, which runs the level with bfloat16's
// products: docs/design.md.
#ifdef __AVX512BF16__
constexpr bool either_cache = true;
bool into_first_level = !is_amd_19h();
#else
constexpr bool either_cache = false;
bool into_first_level = crosswise;
#endif

// call(into_first_level), a constant.
template <typename Call>
FASTATTN_INLINE void with_cache(Call call) {
    if (either_cache && !into_first_level)
        call(std::bool_constant<crosswise && !either_cache>{});
    else
        call(std::bool_constant<crosswise>{});
}

// Inline, as all that call it must be: gcc drops calls of a function that only prefetches, as without effect.
template <bool FIRST_LEVEL = crosswise>
FASTATTN_INLINE void prefetch(const void* address) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch(address, 0, FIRST_LEVEL ? 3 : 2);
#endif
}

template <bool FIRST_LEVEL>
FASTATTN_INLINE void prefetch_bytes(const char* start, std::ptrdiff_t count) {
    for (std::ptrdiff_t i = 0; i < count; i += 64) prefetch<FIRST_LEVEL>(start + i);
}

template <typename T>
FASTATTN_INLINE void prefetch_rows(const T* rows, std::ptrdiff_t stride, std::ptrdiff_t n_rows,
                                   std::ptrdiff_t n_columns) {
    for (std::ptrdiff_t row = 0; row < n_rows; ++row)
        for (std::ptrdiff_t i = 0; i < n_columns; i += 64 / int(sizeof(T))) prefetch(rows + row * stride + i);
}

// Of so many rows at once, which costs no branches.
constexpr int rows_nearer = 8;

// Parts [first, last) of the lines of n_rows: a part is the same line of rows_nearer rows.
FASTATTN_INLINE void prefetch_parts(const char* const* rows, std::ptrdiff_t n_rows, std::ptrdiff_t first,
                                    std::ptrdiff_t last) {
    const std::ptrdiff_t per_line = n_rows / rows_nearer;
    for (std::ptrdiff_t part = first; part < last; ++part) {
        const char* const* row = rows + part % per_line * rows_nearer;
        const std::ptrdiff_t at = part / per_line * 64;
        FASTATTN_UNROLL
        for (int i = 0; i < rows_nearer; ++i) prefetch(row[i] + at);
    }
}

// Keeps the compiler from interleaving rows: the hardware prefetcher follows one row after the other.
FASTATTN_INLINE void keep_order() {
#if defined(__GNUC__) || defined(__clang__)
    __asm__ volatile("" ::: "memory");
#endif
}

}  // namespace
