// Vectors of floats: GCC's and Clang's vector extensions, so that one source serves every processor, and the few
// instructions that they can't name. Everything here is inlined into its caller.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define CSA_INLINE inline __attribute__((always_inline))
#define CSA_LAMBDA __attribute__((always_inline))

namespace continuous_attention {

// CSA_WIDTH sets another width than the processor's own: tests run the layout of wide vectors on narrow machines.
#if defined(CSA_WIDTH)
constexpr int WIDTH = CSA_WIDTH;
#elif defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Int __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Bits __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Half __attribute__((vector_size(WIDTH * 2)));
typedef float VecAt __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t IntAt __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint16_t HalfAt __attribute__((vector_size(WIDTH * 2), aligned(2), may_alias));

CSA_INLINE Vec broadcast(float x) { return x - Vec{}; }
CSA_INLINE Int broadcast(int32_t x) { return x - Int{}; }
CSA_INLINE Vec load(const float* p) { return *reinterpret_cast<const VecAt*>(p); }
CSA_INLINE Int load(const int32_t* p) { return *reinterpret_cast<const IntAt*>(p); }
CSA_INLINE void store(float* p, Vec x) { *reinterpret_cast<VecAt*>(p) = x; }
CSA_INLINE void store(int32_t* p, Int x) { *reinterpret_cast<IntAt*>(p) = x; }

// a > b ? a : b, so b for a NaN: compilers don't see that this is one instruction.
CSA_INLINE Vec maximum(Vec a, Vec b) {
#if defined(__AVX512F__) && !defined(CSA_WIDTH)
    return _mm512_maskz_max_ps(-1, a, b);
#elif defined(__AVX2__) && !defined(CSA_WIDTH)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}
CSA_INLINE Vec minimum(Vec a, Vec b) { return a < b ? a : b; }
CSA_INLINE Vec absolute(Vec x) { return std::bit_cast<Vec>(std::bit_cast<Int>(x) & 0x7fffffff); }

CSA_INLINE float sum(Vec x) {
    float total = 0;
    for (int lane = 0; lane < WIDTH; lane++) total += x[lane];
    return total;
}

CSA_INLINE bool any(Int mask) {
    int32_t seen = 0;
    for (int lane = 0; lane < WIDTH; lane++) seen |= mask[lane];
    return seen != 0;
}

// A polynomial in x, the number that belongs to its highest power first.
template <class... Numbers>
CSA_INLINE Vec polynomial(Vec x, float highest, Numbers... lower) {
    Vec y = broadcast(highest);
    ((y = y * x + lower), ...);
    return y;
}

// How much accuracy a function is asked for: float32's; enough for the lse of half-precision inputs (and no infinities);
// or what is left of it after rounding to bfloat16.
enum class Digits { all, most, few };

// 2^f / 4 for |f| <= 1/2, with a relative error of 1.7e-7, 2.7e-6 with most or 7.5e-5 with few digits.
template <Digits DIGITS>
CSA_INLINE Vec quarter_exp2_near_zero(Vec f) {
    if constexpr (DIGITS == Digits::most)
        return polynomial(f, 2.3925254658e-03f, 1.3979465085e-02f, 6.0061862079e-02f, 1.7328045369e-01f,
                          2.4999981536e-01f);
    if constexpr (DIGITS == Digits::few)
        return polynomial(f, 1.3792917453e-02f, 6.0652780597e-02f, 1.7331524636e-01f, 2.4998201843e-01f);
    return polynomial(f, 3.3161817809e-04f, 2.4178781612e-03f, 1.3876834359e-02f, 6.0055605213e-02f, 1.7328674440e-01f,
                      0.25f);
}

// 2^x / 4; below x = -124 it stays at the smallest normal number, or goes to 0 where not all digits are asked for.
template <Digits DIGITS = Digits::all>
CSA_INLINE Vec quarter_exp2(Vec x) {
#if defined(__AVX512DQ__) && !defined(CSA_WIDTH)
    if constexpr (DIGITS != Digits::all) {
        // The variants with a mask, of all lanes, since GCC warns of the others.
        const Vec f = _mm512_maskz_reduce_ps(-1, x, 0);
        return _mm512_maskz_scalef_ps(-1, quarter_exp2_near_zero<DIGITS>(f), x - f);
    }
#endif
    constexpr float ROUND = 0x1.8p23f;  // adding it moves the integer nearest to x into the lowest bits
    x = maximum(broadcast(-124.0f), x);  // in this order a NaN stays
    Vec shifted = x + ROUND;
    Vec y = quarter_exp2_near_zero<DIGITS>(x - (shifted - ROUND));
    return std::bit_cast<Vec>(std::bit_cast<Bits>(y) + (std::bit_cast<Bits>(shifted) << 23));
}

// 1 / x; with few digits its relative error is up to 6.1e-5.
template <Digits DIGITS = Digits::all>
CSA_INLINE Vec reciprocal(Vec x) {
#if defined(__AVX512F__) && !defined(CSA_WIDTH)
    if constexpr (DIGITS != Digits::all) {
        const Vec near = _mm512_maskz_rcp14_ps(-1, x);
        return DIGITS == Digits::few ? near : near + near * (1.0f - x * near);
    }
#elif defined(CSA_EMULATE_AMX)
    if constexpr (DIGITS == Digits::few) return std::bit_cast<Vec>(std::bit_cast<Int>(1.0f / x) & -0x200);
#endif
    return 1.0f / x;
}

// |x| < 2 ? a : b, and b for a NaN: bit 30 of a float says just that.
CSA_INLINE Vec if_below_two(Vec x, Vec a, Vec b) {
#if defined(__AVX512F__) && !defined(CSA_WIDTH)
    const __m512i bit = _mm512_set1_epi32(0x40000000);
    return _mm512_mask_blend_ps(_mm512_test_epi32_mask(std::bit_cast<__m512i>(x), bit), a, b);
#elif defined(__AVX2__) && !defined(CSA_WIDTH)
    return _mm256_blendv_ps(a, b, std::bit_cast<Vec>(std::bit_cast<Int>(x) << 1));
#else
    return (std::bit_cast<Int>(x) & 0x40000000) != 0 ? b : a;
#endif
}

// Half precision in memory, float32 in registers.

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

CSA_INLINE Int widen(const uint16_t* p) {
    return __builtin_convertvector(*reinterpret_cast<const HalfAt*>(p), Int);
}
CSA_INLINE void narrow(uint16_t* p, Bits x) { *reinterpret_cast<HalfAt*>(p) = __builtin_convertvector(x, Half); }

CSA_INLINE Vec load(const bfloat16* p) { return std::bit_cast<Vec>(widen(&p->bits) << 16); }

CSA_INLINE void store(bfloat16* p, Vec x) {
    Bits bits = std::bit_cast<Bits>(x);
    Bits nearest = bits + 0x7fff + ((bits >> 16) & 1);
    narrow(&p->bits, (x == x ? nearest : (bits | 0x400000)) >> 16);
}

CSA_INLINE Vec load(const float16* p) {
    Int half = widen(&p->bits);
    Int sign = (half & 0x8000) << 16, rest = (half & 0x7fff) << 13;
    Int normal = rest + (112 << 23);
    Vec denormal = __builtin_convertvector(half & 0x7fff, Vec) * 0x1p-24f;
    Int y = rest < (1 << 23) ? std::bit_cast<Int>(denormal) : normal;
    y = rest >= (31 << 23) ? (rest | (0xff << 23)) : y;
    return std::bit_cast<Vec>(y | sign);
}

CSA_INLINE void store(float16* p, Vec x) {
    Bits bits = std::bit_cast<Bits>(x);
    Bits sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    Bits normal = (rest + 0xfff + ((rest >> 13) & 1) - (112u << 23)) >> 13;
    Bits denormal = std::bit_cast<Bits>(absolute(x) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
    Bits y = rest < (113u << 23) ? denormal : normal;
    y = rest >= 0x477ff000u ? Bits{} + 0x7c00u : y;  // 65520 and above round to infinity
    y = rest > (0xffu << 23) ? Bits{} + 0x7e00u : y;
    narrow(&p->bits, y | sign);
}

CSA_INLINE float to_float(float x) { return x; }
CSA_INLINE float to_float(bfloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
CSA_INLINE float to_float(float16 x) {
    uint16_t row[WIDTH] = {x.bits};
    return load(reinterpret_cast<const float16*>(row))[0];
}

CSA_INLINE void from_float(float* p, float x) { *p = x; }
template <class T>
CSA_INLINE void from_float(T* p, float x) {
    T row[WIDTH];
    store(row, broadcast(x));
    *p = row[0];
}

// n numbers from one place and type to another.
template <class From>
CSA_INLINE void read(const From* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) store(to + i, load(from + i));
    for (; i < n; i++) to[i] = to_float(from[i]);
}
template <class To>
CSA_INLINE void write(const float* from, To* to, int64_t n) {
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) store(to + i, load(from + i));
    for (; i < n; i++) from_float(to + i, from[i]);
}

// Flushes denormal numbers to zero while it lives: they would slow the far ends of the exponentials down.
class FlushDenormals {
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();

  public:
    FlushDenormals() { _mm_setcsr(before | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before); }
#endif
};

}  // namespace continuous_attention
