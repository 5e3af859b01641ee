// What becomes of a query's sums: out and lse, or a piece that is merged with the other pieces of its path.
#pragma once

#include <cmath>
#include <limits>

#include "block.h"
#include "segment.h"

namespace continuous_attention {

// The integrals over one piece of a query's path, relative to 2^reference: ∫ e^a and, in `sums`, ∫ e^a v.
// Where the piece has no length, total is 0 and the sums are the value of the path's last node, if the piece holds it.
struct Integrals {
    float reference, total;
    float* sums;  // (Dv)
};

// The sums of a piece without length: the limit of a path whose length goes to 0.
template <class T>
void last_value(const Group& group, int64_t row, Run piece, float* sums) {
    std::fill_n(sums, group.problem.Dv, 0.0f);
    if (group.part_of(row, piece).ends)
        read(group.node_of<const T>(group.problem.value, group.sees(row).to - 1), sums, group.problem.Dv);
}

// Pieces of paths, written by different jobs and read by merge(); a single piece needs no memory, nor merging.
class Pieces {
  public:
    Pieces(const Problem& problem, int64_t count)
        : count(count),
          rows_(problem.Hq / problem.Hkv * problem.Lq),
          dim_(problem.Dv),
          data_(buffer(count == 1 ? 0 : problem.B * problem.Hkv * rows_ * count * (dim_ + 2))) {}

    const int64_t count;

    void put(const Group& group, int64_t row, int64_t piece, const Integrals& x) {
        float* to = at(group, row, piece);
        to[0] = x.reference, to[1] = x.total;
        std::copy_n(x.sums, dim_, to + 2);
    }

    // The integral is additive: pieces that share one node merge exactly.
    Integrals merge(const Group& group, int64_t row, float* sums) const {
        float reference = -std::numeric_limits<float>::infinity(), total = 0;
        for (int64_t piece = 0; piece < count; piece++) {
            const float* x = at(group, row, piece);
            if (x[1] != 0 && !(x[0] <= reference)) reference = x[0];
        }
        const bool no_length = std::isinf(reference) && reference < 0;
        std::fill_n(sums, dim_, 0.0f);
        for (int64_t piece = 0; piece < count; piece++) {
            const float* x = at(group, row, piece);
            const float factor = no_length ? 1.0f : x[1] == 0 ? 0.0f : std::exp2(x[0] - reference);
            if (factor == 0) continue;
            total += factor * x[1];
            for (int64_t d = 0; d < dim_; d++) sums[d] += factor * x[2 + d];
        }
        return {reference, total, sums};
    }

  private:
    int64_t rows_, dim_;
    Buffer data_;

    float* at(const Group& group, int64_t row, int64_t piece) const {
        return data_.get() + ((group.index() * rows_ + row) * count + piece) * (dim_ + 2);
    }
};

// Writes what is known of a query. Overwrites the sums.
template <class T>
void write_result(const Result& result, const Group& group, int64_t row, Integrals x) {
    const int64_t dim = group.problem.Dv, flat = group.flat(row);
    if (x.total != 0) {
        const float scale = 1 / x.total;
        for (int64_t d = 0; d < dim; d++) x.sums[d] *= scale;
    }
    T* out = group.row_of<T>(result.out, row);
    write(x.sums, out, dim);
    // In float64, since the reference may be large and the rest of the sum small.
    result.lse[flat] = x.total == 0 ? -std::numeric_limits<float>::infinity()
                                    : float(std::log(2.0) * x.reference + std::log(double(x.total)));
    if (result.out_rest) {
        for (int64_t d = 0; d < dim; d++) x.sums[d] -= to_float(out[d]);
        write(x.sums, static_cast<T*>(result.out_rest) + flat * dim, dim);
    }
    if (result.normalizer) {
        result.normalizer[2 * flat] = x.reference;
        result.normalizer[2 * flat + 1] = x.total;
    }
}

}  // namespace continuous_attention
