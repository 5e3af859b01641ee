// The one matrix product of these kernels, C += A B or C = A B, for tiles that lie in the first-level cache.
#pragma once

#include "simd.h"

namespace continuous_attention {

// A register tile is 6 rows of PANEL columns: its accumulators, one row of B and one number of A fill the registers.
#if defined(__aarch64__)
constexpr int TILE_VECTORS = 4;
#else
constexpr int TILE_VECTORS = WIDTH == 16 ? 4 : 2;
#endif
constexpr int PANEL = TILE_VECTORS * WIDTH;
constexpr int TILE_ROWS = 6;
inline int64_t whole_panels(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

// The left operand of a product, and its transpose. The layout is a type, since with two strides that are known only when
// the product runs there aren't enough registers for addresses.
struct Transposed {
    const float* data;
    int64_t stride;
    Transposed from_row(int64_t i) const { return {data + i, stride}; }
    float number(int64_t row, int64_t column) const { return data[column * stride + row]; }
};
struct Matrix {
    const float* data;
    int64_t stride;
    Matrix from_row(int64_t i) const { return {data + i * stride, stride}; }
    Transposed transposed() const { return {data, stride}; }
    float number(int64_t row, int64_t column) const { return data[row * stride + column]; }
};

// ROWS × PANEL numbers of C, inner dimension n. `soon` is memory that will be wanted next: it is fetched meanwhile, since
// the second-level cache alone hides no more than half of the time that rows need to arrive.
template <int ROWS, bool ADD, class A>
CSA_INLINE void tile(A a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t n, const float* soon) {
    // A multiply-add takes 4 cycles and two can start in each, so few rows need several sums each.
    constexpr int CHAINS = ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1;
    Vec sums[CHAINS][ROWS][TILE_VECTORS] = {};
    auto step = [&](Vec(&to)[ROWS][TILE_VECTORS], int64_t k) CSA_LAMBDA {
        Vec row[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) row[v] = load(b + k * b_row + v * WIDTH);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            Vec factor = broadcast(a.number(r, k));
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) to[r][v] += factor * row[v];
        }
    };
    int64_t k = 0;
    for (; k + 8 <= n; k += 8) {
        __builtin_prefetch(soon + k * 2, 0, 2);
        // Unrolled in part, so that it stays a loop until registers are given out: GCC then leaves the sums in theirs.
#pragma GCC unroll 4
        for (int i = 0; i < 8; i += CHAINS)
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; c++) step(sums[c], k + i + c);
    }
    for (; k < n; k++) step(sums[0], k);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) {
            Vec sum = sums[0][r][v];
#pragma GCC unroll 4
            for (int i = 1; i < CHAINS; i++) sum += sums[i][r][v];
            // A sum of its own first, then added: one long sum would lose digits.
            float* to = c + r * c_row + v * WIDTH;
            store(to, ADD ? load(to) + sum : sum);
        }
}

// C (rows, PANEL) = or += A (rows, n) · B (n, PANEL).
template <bool ADD, class A>
inline void product(int64_t rows, int64_t n, A a, const float* b, int64_t b_row, float* c, int64_t c_row,
                    const float* soon) {
    for (; rows >= TILE_ROWS; rows -= TILE_ROWS) {
        tile<TILE_ROWS, ADD>(a, b, b_row, c, c_row, n, soon);
        soon += 2 * n;
        a = a.from_row(TILE_ROWS);
        c += TILE_ROWS * c_row;
    }
    switch (rows) {
        case 5: return tile<5, ADD>(a, b, b_row, c, c_row, n, soon);
        case 4: return tile<4, ADD>(a, b, b_row, c, c_row, n, soon);
        case 3: return tile<3, ADD>(a, b, b_row, c, c_row, n, soon);
        case 2: return tile<2, ADD>(a, b, b_row, c, c_row, n, soon);
        case 1: return tile<1, ADD>(a, b, b_row, c, c_row, n, soon);
    }
}

}  // namespace continuous_attention
