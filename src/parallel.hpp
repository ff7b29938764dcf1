// Work shared among threads: each worker draws the next item from one counter that belongs to the call.
#pragma once

#include <atomic>
#include <cstddef>

#ifdef _OPENMP
#include <omp.h>
#endif

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

}  // namespace
