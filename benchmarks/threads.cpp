// Stands between the kernels and the OpenMP runtime that torch has loaded, and starts their threads in another way.
// What torch itself starts goes on to its runtime. See threads.py, which compiles this and preloads it.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <unordered_map>
#include <vector>

using StartTeam = void (*)(void (*)(void*), void*, unsigned, unsigned);

static StartTeam team_of(const char* library, int flags) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL | flags);
    void* start = handle ? dlsym(handle, "GOMP_parallel") : nullptr;
    if (!start) {
        std::fprintf(stderr, "no GOMP_parallel in %s: %s\n", library, dlerror());
        std::exit(1);
    }
    return reinterpret_cast<StartTeam>(start);
}

// dladdr searches all symbols of a library, so each body is looked up once per thread.
static bool is_of_kernels(void (*body)(void*)) {
    thread_local std::unordered_map<void*, bool> known;
    void* address = reinterpret_cast<void*>(body);
    auto [place, is_new] = known.try_emplace(address, false);
    Dl_info info;
    if (is_new) place->second = dladdr(address, &info) && std::strstr(info.dli_fname, "/kernels/cpu/_");
    return place->second;
}

static void start_new_threads(void (*body)(void*), void* data, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; i++) others.emplace_back(body, data);
    body(data);
    for (std::thread& other : others) other.join();
}

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
    static const StartTeam of_torch = team_of(std::getenv("CSA_OPENMP_OF_TORCH"), RTLD_NOLOAD);
    static const char* way = std::getenv("CSA_WAY");
    static const StartTeam of_kernels =
        !std::strcmp(way, "torch's pool")       ? of_torch
        : !std::strcmp(way, "a second runtime") ? team_of(std::getenv("CSA_OPENMP_COPY"), 0)
                                                : start_new_threads;
    (is_of_kernels(body) ? of_kernels : of_torch)(body, data, threads, flags);
}
