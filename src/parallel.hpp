// Work shared among threads: each worker draws the next item from one counter that belongs to the call.
#pragma once

#include <cstddef>
#include <cstdlib>

#if defined(_MSC_VER)
#include <malloc.h>
#endif

#ifdef _OPENMP
#include <omp.h>
#endif

#include <atomic>

namespace {

struct ItemCounter {
    std::atomic<std::ptrdiff_t> next{0};
    std::ptrdiff_t take() { return next.fetch_add(1, std::memory_order_relaxed); }
};

#ifdef _OPENMP
constexpr bool has_openmp = true;
inline int openmp_max_threads() { return omp_get_max_threads(); }
#else
constexpr bool has_openmp = false;
inline int openmp_max_threads() { return 1; }
#endif

// Scratch memory on a cache-line (and 64-byte vector) boundary; null when there is none.
inline void* allocate_scratch(std::size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
#if defined(_MSC_VER)
    return _aligned_malloc(bytes ? bytes : 64, 64);
#else
    return std::aligned_alloc(64, bytes ? bytes : 64);
#endif
}

inline void free_scratch(void* memory) {
#if defined(_MSC_VER)
    _aligned_free(memory);
#else
    std::free(memory);
#endif
}

}  // namespace
