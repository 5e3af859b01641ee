// Which variants of the kernels the processor and the operating system can run. Plain code, for every processor.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace continuous_attention {

#if defined(__x86_64__)

inline bool has_avx2() {  // x86-64-v3, with what the operating system must save; not all compilers know F16C's name
    unsigned eax, ebx, ecx, edx;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
}

inline bool has_avx512() {  // x86-64-v4
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

inline bool has_amx() {  // x86-64-v4 with AVX512-BF16, AMX-TILE and AMX-BF16; not all compilers know their names
    unsigned eax, ebx, ecx, edx;
    if (!has_avx512() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    const bool tiles = (edx >> 24 & 1) && (edx >> 22 & 1);
    if (!tiles || !__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax >> 5 & 1)) return false;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3;  // the operating system saves tiles
}

// Linux gives the tile registers to a process only on request.
inline bool request_amx() {
#if defined(__linux__)
    constexpr long request_permission = 0x1023, tile_data = 18;
    return has_amx() && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

#else

inline bool has_avx2() { return false; }
inline bool has_avx512() { return false; }
inline bool request_amx() { return false; }

#endif

// The names of the variants that run here, best first. Asks for the tile registers where there are any.
inline std::vector<std::string> runnable() {
    std::vector<std::string> names;
    if (request_amx()) names.push_back("amx");
    if (has_avx512()) names.push_back("avx512");
    if (has_avx2()) names.push_back("avx2");
    names.push_back("portable");
    return names;
}

}  // namespace continuous_attention
