// Running a job on several threads: on the pool that torch's own operators use, where the process has one.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "simd.h"

namespace continuous_attention {

// torch's pool is the OpenMP runtime that it loads. A second pool would fight with it for the cores, so its entry
// point is looked up at run time: nothing is linked, and the kernels need no compiler with OpenMP.
using StartTeam = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
inline StartTeam team_of_the_process() {
    static const auto start = reinterpret_cast<StartTeam>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return start;
}

// Runs `body()` on up to `threads` threads at once, this one among them, and returns when all have ended.
template <class Body>
void on_threads(int threads, Body& body) {
    if (threads <= 1) return body();
    if (StartTeam start = team_of_the_process())
        return start([](void* data) { (*static_cast<Body*>(data))(); }, &body, unsigned(threads), 0);
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back([&] { body(); });
    body();
    for (std::thread& other : others) other.join();
}

// Hands out the jobs 0 … count − 1, each to the first thread that is free. `Worker` holds a thread's scratch memory
// and is made once per thread; which thread does a job must not matter to its result.
template <class MakeWorker>
void for_each_job(int threads, int64_t count, const MakeWorker& make_worker) {
    std::atomic<int64_t> next{0};
    auto body = [&] {
        [[maybe_unused]] FlushDenormals flush;
        auto worker = make_worker();
        for (int64_t job; (job = next.fetch_add(1)) < count;) worker(job);
    };
    on_threads(int(count < threads ? count : threads), body);
}

}  // namespace continuous_attention
