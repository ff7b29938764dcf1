// Threads: how many there are, whether they are awake, and when they may run Python code.
#pragma once

#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#ifdef _OPENMP
#include <mutex>
#include <omp.h>
#include <system_error>
#include <vector>
#endif

namespace {

inline double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void pause_thread() { std::this_thread::yield(); }

// Threads that run Python code in the middle of a call, or wait for the GIL to do so. When the interpreter ends it ends
// those that wait, and in a parallel region that ends the process: so the way in is closed before and they are awaited.
std::atomic<int> in_python{0};
std::atomic<bool> python_closed{false};

inline void leave_python() { in_python.fetch_sub(1); }

inline bool enter_python() {
    in_python.fetch_add(1);
    if (!python_closed.load()) return true;
    leave_python();
    return false;
}

inline void close_python(double patience) {
    python_closed.store(true);
    for (double end = seconds() + patience; in_python.load() > 0 && seconds() < end;)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

inline void forget_other_threads() { in_python.store(0); }

// Threads that have worked wait awake for some milliseconds (GCC's and LLVM's OpenMP); after that, to wake one takes
// tens of microseconds. So short calls are divided when they follow one another.
constexpr double surely_awake = 1e-3;     // seconds
thread_local double last_call = -1;         // when this thread's last call ended that was long enough to be divided

inline bool follows_closely() { return seconds() - last_call < surely_awake; }
inline void note_call() { last_call = seconds(); }

#ifdef _OPENMP
constexpr bool has_openmp = true;
inline int openmp_max_threads() { return omp_get_max_threads(); }

thread_local int team_size = 1;  // of this thread's last region: OpenMP keeps as many threads for its next

// As many threads as wanted, or as can be started: OpenMP ends the process when it cannot start one, because memory or
// the number of threads is limited. So those it has yet to start are first started here, all at once.
inline int startable_threads(int wanted) {
    if (wanted > team_size) {
        std::vector<std::thread> others;
        std::mutex gate;
        std::unique_lock<std::mutex> closed(gate);
        try {
            others.reserve(wanted);
            while (static_cast<int>(others.size()) + 1 < wanted)
                others.emplace_back([&gate] { std::lock_guard<std::mutex> passed(gate); });
        } catch (const std::system_error&) {
        } catch (const std::bad_alloc&) {
        }
        wanted = static_cast<int>(others.size()) + 1;
        closed.unlock();
        for (std::thread& other : others) other.join();
    }
    return team_size = wanted;
}
#else
constexpr bool has_openmp = false;
inline int openmp_max_threads() { return 1; }
inline int startable_threads(int wanted) { return wanted; }
#endif

}  // namespace
