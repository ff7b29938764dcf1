// The scratch of one call, kept for the next. Freed, it might go back to the system, and its next pages would have to
// be faulted in: a third of the time of 12 heads of 128 tokens on two threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>

#ifndef FASTATTN_KEPT_SCRATCH   // bytes; 0 under sanitizers, which watch the ends of what malloc gives
#define FASTATTN_KEPT_SCRATCH (std::size_t(4) << 20)
#endif

namespace {

// Ahead of each piece lies its size, on a cache line of its own.
constexpr std::size_t scratch_header = 64;
std::atomic<char*> spare_scratch{nullptr};

// `size` bytes of any content, or null when there is no memory for them.
inline char* take_scratch(std::size_t size) {
    char* piece = spare_scratch.exchange(nullptr, std::memory_order_acquire);
    if (piece && *reinterpret_cast<std::size_t*>(piece) < size) {
        std::free(piece);
        piece = nullptr;
    }
    if (!piece) {
        piece = static_cast<char*>(std::malloc(scratch_header + size));
        if (!piece) return nullptr;
        *reinterpret_cast<std::size_t*>(piece) = size;
    }
    return piece + scratch_header;
}

inline void return_scratch(char* scratch) {
    char* piece = scratch - scratch_header;
    if (*reinterpret_cast<std::size_t*>(piece) <= FASTATTN_KEPT_SCRATCH)
        piece = spare_scratch.exchange(piece, std::memory_order_acq_rel);
    std::free(piece);
}

}  // namespace
