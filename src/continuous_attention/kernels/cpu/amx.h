// Matrix products of bfloat16 on AMX: the tile instructions, a patch of four tiles made of them, and rounding to pairs.
//
// A tile is 16 rows of 64 bytes. dot() adds A B to C, with A 16 rows of 32 bfloat16, B 16 rows of 16 pairs, C 16 rows
// of 16 float32: C[m][n] += Σ_k A[m][2k] B[k].pair[n].low + A[m][2k+1] B[k].pair[n].high. So what is summed over goes
// along the rows of A, and two by two, as pairs, down the rows of B.
#pragma once

#include "simd.h"

namespace continuous_attention {

// CSA_EMULATE_AMX has tests run these kernels, in plain C++, on processors without tiles.
#if defined(__AMX_BF16__) || defined(CSA_EMULATE_AMX)
constexpr bool HAS_AMX = true;
#else
constexpr bool HAS_AMX = false;
#endif

constexpr int TILE_SIDE = 16;               // rows of every tile, and numbers in a row of C
constexpr int64_t TILE_BYTES = 64;          // of a row
constexpr int TILE_DEPTH = 32;              // what one dot() sums over
constexpr int PATCH = 2 * TILE_SIDE;        // rows and columns of a patch

inline int64_t whole_patches(int64_t n) { return (n + PATCH - 1) / PATCH * PATCH; }

#if defined(__AMX_BF16__) && !defined(CSA_EMULATE_AMX)

// Assembly, since the compilers' functions need literal numbers of tiles, and GCC's don't say that they touch memory.
template <int TILE>
CSA_INLINE void tile_zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int TILE>
CSA_INLINE void tile_load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
CSA_INLINE void tile_store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int C, int A, int B>
CSA_INLINE void tile_dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// The tiles of this thread are all of full size while it lives.
class Tiles {
    struct alignas(64) Configuration {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };

  public:
    Tiles() {
        Configuration configuration;
        for (int i = 0; i < 8; i++) configuration.row_bytes[i] = TILE_BYTES, configuration.rows[i] = TILE_SIDE;
        __asm__ volatile("ldtilecfg %0" ::"m"(configuration));
    }
    ~Tiles() { __asm__ volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
};

#else

struct EmulatedTile {
    alignas(64) uint32_t row[TILE_SIDE][16];
};
inline thread_local EmulatedTile emulated_tiles[8];

template <int TILE>
inline void tile_zero() {
    emulated_tiles[TILE] = {};
}
template <int TILE>
inline void tile_load(const void* from, int64_t stride) {
    for (int i = 0; i < TILE_SIDE; i++)
        std::memcpy(emulated_tiles[TILE].row[i], static_cast<const char*>(from) + i * stride, TILE_BYTES);
}
template <int TILE>
inline void tile_store(void* to, int64_t stride) {
    for (int i = 0; i < TILE_SIDE; i++)
        std::memcpy(static_cast<char*>(to) + i * stride, emulated_tiles[TILE].row[i], TILE_BYTES);
}
// In the order that the instruction's description has: even and odd numbers apart, and then their sum is added.
template <int C, int A, int B>
inline void tile_dot() {
    auto low = [](uint32_t pair) { return std::bit_cast<float>(pair << 16); };
    auto high = [](uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000); };
    for (int m = 0; m < TILE_SIDE; m++) {
        float even[16] = {}, odd[16] = {};
        for (int k = 0; k < 16; k++) {
            const uint32_t a = emulated_tiles[A].row[m][k], *b = emulated_tiles[B].row[k];
            for (int n = 0; n < 16; n++) even[n] += low(a) * low(b[n]), odd[n] += high(a) * high(b[n]);
        }
        for (int n = 0; n < 16; n++) {
            uint32_t& c = emulated_tiles[C].row[m][n];
            c = std::bit_cast<uint32_t>(std::bit_cast<float>(c) + (even[n] + odd[n]));
        }
    }
}

struct Tiles {
    Tiles() {}
    ~Tiles() {}  // as the real one
    Tiles(const Tiles&) = delete;
};

#endif

// Two tiles side by side, or one above the other.
struct TilePair {
    const void *first, *second;
    int64_t stride;
};
// The four tiles of a patch of C.
struct Patch {
    float *upper_left, *upper_right, *lower_left, *lower_right;
    int64_t stride;
};

// C = or += Σ_k A_k B_k for a patch, k = 0 … n − 1; a(k) gives the upper and the lower tile of A_k, b(k) the left and
// the right one of B_k. Each tile that is loaded serves two products.
template <bool ADD, class A, class B>
CSA_INLINE void patch(int64_t n, const A& a, const B& b, const Patch& c) {
    if (ADD) {
        tile_load<0>(c.upper_left, c.stride);
        tile_load<1>(c.upper_right, c.stride);
        tile_load<2>(c.lower_left, c.stride);
        tile_load<3>(c.lower_right, c.stride);
    } else {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
    }
    for (int64_t k = 0; k < n; k++) {
        const TilePair rows = a(k), columns = b(k);
        tile_load<4>(rows.first, rows.stride);
        tile_load<6>(columns.first, columns.stride);
        tile_dot<0, 4, 6>();
        tile_load<7>(columns.second, columns.stride);
        tile_dot<1, 4, 7>();
        tile_load<5>(rows.second, rows.stride);
        tile_dot<2, 5, 6>();
        tile_dot<3, 5, 7>();
    }
    tile_store<0>(c.upper_left, c.stride);
    tile_store<1>(c.upper_right, c.stride);
    tile_store<2>(c.lower_left, c.stride);
    tile_store<3>(c.lower_right, c.stride);
}

// The bfloat16 nearest to x is the upper half of this; the lower half is left over.
CSA_INLINE Bits rounded(Vec x) { return std::bit_cast<Bits>(x) + 0x8000; }
CSA_INLINE Bits as_low(Bits rounded) { return rounded >> 16; }
CSA_INLINE Bits as_high(Bits rounded) { return rounded & 0xffff0000; }

// A vector of pairs in memory.
struct Pairs {
    alignas(WIDTH * 4) uint32_t pair[WIDTH];
};
CSA_INLINE Bits load(const Pairs& from) {
    return std::bit_cast<Bits>(load(reinterpret_cast<const int32_t*>(from.pair)));
}
CSA_INLINE void store(Pairs& to, Bits x) { store(reinterpret_cast<int32_t*>(to.pair), std::bit_cast<Int>(x)); }

// total + low + high, for each lane's pair.
CSA_INLINE Vec add_pairs(Vec total, Bits pairs) {
#if defined(__AVX512BF16__) && !defined(CSA_WIDTH)
    return _mm512_dpbf16_ps(total, std::bit_cast<__m512bh>(pairs), std::bit_cast<__m512bh>(Bits{} + 0x3f803f80));
#else
    return total + (std::bit_cast<Vec>(pairs << 16) + std::bit_cast<Vec>(as_high(pairs)));
#endif
}

}  // namespace continuous_attention
