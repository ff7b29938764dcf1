// The items of one call, and who does which.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <new>

namespace {

// Items that lie one after another, [start, end), on a cache line of their own.
struct alignas(64) Part {
    std::ptrdiff_t start, end;
    std::atomic<std::ptrdiff_t> next;
};

constexpr std::size_t part_bytes = sizeof(Part);

class Items {
    Part* parts = nullptr;
    int n_parts = 0;
    std::atomic<int> helpers{0};
    std::atomic<bool> ended{false};

public:
    // Into one part for all workers or into one for each, in `memory` (n, part_bytes) that is aligned to it.
    void divide(void* memory, int n, std::ptrdiff_t n_items) {
        parts = static_cast<Part*>(memory);
        n_parts = n;
        for (int i = 0; i < n; ++i) {
            Part* part = new (parts + i) Part;
            part->start = i ? parts[i - 1].end : 0;
            part->end = part->start + n_items / n + (i < n_items % n);
            part->next.store(part->start, std::memory_order_relaxed);
        }
    }
    // The part where a worker begins.
    int part_of(int worker) const { return worker % n_parts; }
    // The next item of a worker's own part, or else one that another has left; -1 when there is none.
    std::ptrdiff_t take(int own) {
        for (int i = own; i < own + n_parts; ++i) {
            Part& part = parts[i < n_parts ? i : i - n_parts];
            if (part.next.load(std::memory_order_relaxed) >= part.end) continue;
            const std::ptrdiff_t item = part.next.fetch_add(1, std::memory_order_relaxed);
            if (item < part.end) return item;
        }
        return -1;
    }
    // The same where there is one part and one worker, without an atomic addition.
    std::ptrdiff_t take_alone() {
        const std::ptrdiff_t item = parts->next.load(std::memory_order_relaxed);
        if (item >= parts->end) return -1;
        parts->next.store(item + 1, std::memory_order_relaxed);
        return item;
    }
    std::ptrdiff_t taken() const {
        std::ptrdiff_t count = 0;
        for (int i = 0; i < n_parts; ++i)
            count += std::min(parts[i].next.load(std::memory_order_relaxed), parts[i].end) - parts[i].start;
        return count;
    }
    // Nobody finds another item.
    void stop() {
        ended.store(true, std::memory_order_relaxed);
        for (int i = 0; i < n_parts; ++i) parts[i].next.store(parts[i].end, std::memory_order_relaxed);
    }
    bool stopped() const { return ended.load(std::memory_order_relaxed); }
    // Workers beside the calling thread. One that has not begun when the items run out will find nothing to do.
    void join() { helpers.fetch_add(1, std::memory_order_relaxed); }
    void leave() { helpers.fetch_sub(1, std::memory_order_relaxed); }
    bool others_work() const { return helpers.load(std::memory_order_relaxed) > 0; }
};

}  // namespace
