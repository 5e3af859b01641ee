// How bfloat16 numbers lie in memory for AMX, for both directions.
//
// A block of 64 rows is lanes in 4 vectors of 16, two and two of which make a patch's columns. Tiles of scores are
// [vector][nodes][16 lanes], as the walk along the path wants them; nodes come in groups of 32 that begin at multiples
// of 32, a patch's rows. Place i of a group of weights belongs to node i − 1, as the walk finds the weight of node i − 1
// when it is at node i; so everything that weights are multiplied with is laid out one place later too.
//
//   keys, values          as they are                      A of the scores (places are nodes)
//   packed lanes          [vector][dims / 2][16 lanes]     B of the scores: pairs of dims
//   packed rows           [half][dims / 16][16 pairs][16]  B of what is summed over lanes: lane j of the half's first
//                                                          vector with lane j of its second
//   turned nodes          [group][dims][32 places]         A of what is summed over nodes
#pragma once

#include <utility>

#include "amx.h"
#include "block.h"
#include "threads.h"

namespace continuous_attention {

constexpr int AMX_VECTORS = BLOCK / 16, AMX_HALVES = AMX_VECTORS / 2;
constexpr int32_t AMX_TILE = 128;  // nodes
constexpr int AMX_GROUPS = AMX_TILE / PATCH;

using PairBuffer = std::unique_ptr<Pairs[], Free>;
inline PairBuffer pair_buffer(int64_t count) {
    return PairBuffer(reinterpret_cast<Pairs*>(buffer(count * WIDTH).release()));
}

inline Run whole_groups(Run run) {
    return run.empty() ? run : Run{run.from / PATCH * PATCH, int32_t(whole_patches(run.to))};
}
inline Run intersection(Run a, Run b) { return {std::max(a.from, b.from), std::min(a.to, b.to)}; }

// Transposes 16 × 16 numbers. Every round shuffles the upper half of the rows into the lower one, number by number,
// which rotates the bits of (row, column) by one place; after four, row and column have changed places.
template <size_t... I>
CSA_INLINE Bits shuffle(Bits a, Bits b, int half, std::index_sequence<I...>) {
    constexpr int N = sizeof...(I);
    if (half) return __builtin_shufflevector(a, b, (int(I) % 2 * N + int(I) / 2 + N / 2)...);
    return __builtin_shufflevector(a, b, (int(I) % 2 * N + int(I) / 2)...);
}
CSA_INLINE void transpose(Bits (&x)[WIDTH]) {
    constexpr auto lanes = std::make_index_sequence<WIDTH>();
#pragma GCC unroll 4
    for (int n = 1; n < WIDTH; n *= 2) {
        Bits y[WIDTH];
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH / 2; i++) {
            y[2 * i] = shuffle(x[i], x[i + WIDTH / 2], 0, lanes);
            y[2 * i + 1] = shuffle(x[i], x[i + WIDTH / 2], 1, lanes);
        }
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) x[i] = y[i];
    }
}

// Numbers d … d + 15 of a row of `dim`, each in the lower half of a lane; 0 beyond its end and where there is no row.
CSA_INLINE Bits lower_halves(const bfloat16* row, int64_t d, int64_t dim) {
    if (!row || d >= dim) return Bits{};
    if (d + WIDTH <= dim) return std::bit_cast<Bits>(widen(&row[d].bits));
    uint16_t rest[WIDTH] = {};
    std::memcpy(rest, row + d, (dim - d) * sizeof(uint16_t));
    return std::bit_cast<Bits>(widen(rest));
}
// Numbers d … d + 31, as pairs.
CSA_INLINE Bits pairs_of(const bfloat16* row, int64_t d, int64_t dim) {
    uint32_t pairs[WIDTH] = {};
    if (row && d < dim) std::memcpy(pairs, row + d, std::min<int64_t>(dim - d, 2 * WIDTH) * sizeof(bfloat16));
    return std::bit_cast<Bits>(load(reinterpret_cast<const int32_t*>(pairs)));
}

// Where a block's rows are; null for blank lanes, which count as rows of zeros.
struct Rows {
    const bfloat16* row[BLOCK];
    Rows(const Block& block, const Tensor4& x) {
        for (int lane = 0; lane < BLOCK; lane++)
            row[lane] = lane >= block.rows || block.blank[lane]
                            ? nullptr
                            : block.group.row_of<const bfloat16>(x, block.first + lane);
    }
};

inline void pack_lanes(const Rows& rows, int64_t dim, Pairs* packed) {
    for (int v = 0; v < AMX_VECTORS; v++)
        for (int64_t d = 0; d < whole_patches(dim); d += 2 * WIDTH) {
            Bits x[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) x[i] = pairs_of(rows.row[v * WIDTH + i], d, dim);
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) store(*packed++, x[i]);
        }
}

inline void pack_rows(const Rows& rows, int64_t dim, Pairs* packed) {
    for (int h = 0; h < AMX_HALVES; h++)
        for (int64_t d = 0; d < whole_patches(dim); d += WIDTH)
            for (int j = 0; j < WIDTH; j++) {
                const bfloat16* const* at = rows.row + h * 2 * WIDTH + j;
                store(*packed++, lower_halves(at[0], d, dim) | lower_halves(at[WIDTH], d, dim) << 16);
            }
}

// [dims][16 lanes] to [16 lanes][dims], in place; `scratch` has room for as much.
inline void turn_lanes(float* x, int64_t dims, float* scratch) {
    std::copy_n(x, dims * WIDTH, scratch);
    for (int64_t d = 0; d < dims; d += WIDTH) {
        Bits tile[WIDTH];
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) tile[i] = std::bit_cast<Bits>(load(scratch + (d + i) * WIDTH));
        transpose(tile);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) store(x + i * dims + d, std::bit_cast<Vec>(tile[i]));
    }
}

template <class T>
inline float dot_of(const bfloat16* a, const T* b, int64_t dim) {
    Vec sums{};
    float rest = 0;
    int64_t d = 0;
    for (; d + WIDTH <= dim; d += WIDTH) sums += load(a + d) * load(b + d);
    for (; d < dim; d++) rest += to_float(a[d]) * to_float(b[d]);
    return sum(sums) + rest;
}

// to[lane] = factor · row·x, for the rows of a block.
inline void dots(const Rows& rows, const float* x, int64_t dim, float factor, float* to) {
    for (int lane = 0; lane < BLOCK; lane++)
        if (rows.row[lane]) to[lane] = factor * dot_of(rows.row[lane], x, dim);
}

// One group of turned nodes: its places are the nodes from `first` - 1 on; those outside `valid` are 0.
inline void turn_group(const Group& group, const Tensor4& x, int64_t dim, int32_t first, Run valid, Pairs* turned) {
    auto node = [&](int32_t i) {
        return valid.from <= i && i < valid.to ? group.node_of<const bfloat16>(x, i) : nullptr;
    };
    for (int64_t d = 0; d < whole_patches(dim); d += WIDTH) {
        Bits pairs[WIDTH];
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) {
            const int32_t even = first + 2 * i - 1;
            pairs[i] = lower_halves(node(even), d, dim) | lower_halves(node(even + 1), d, dim) << 16;
        }
        transpose(pairs);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) store(*turned++, pairs[i]);
    }
}

// All nodes of a tensor, turned. Shared by all jobs; as large as the tensor itself.
class TurnedNodes {
  public:
    TurnedNodes(const Problem& problem, const Tensor4& x, int64_t dim)
        : groups_(problem.Lk / PATCH + 1),
          size_(whole_patches(dim)),
          data_(pair_buffer(problem.B * problem.Hkv * groups_ * size_)) {
        for_each_job(problem.threads, problem.B * problem.Hkv * groups_, [&] {
            return [&](int64_t job) {
                turn_group(group_of(problem, job / groups_), x, dim, int32_t(job % groups_ * PATCH),
                           {0, int32_t(problem.Lk)}, data_.get() + job * size_);
            };
        });
    }
    int64_t group_size() const { return size_; }
    const Pairs* operator()(const Group& group, int32_t place) const {
        return data_.get() + (group.index() * groups_ + place / PATCH) * size_;
    }

  private:
    int64_t groups_, size_;
    PairBuffer data_;
};

// A tile's groups of turned nodes. What the run doesn't hold must count as 0, whatever is there: such groups are made
// again, and a tile has at most two of them.
class TurnedTile {
  public:
    TurnedTile(const TurnedNodes& all, const Tensor4& x, int64_t dim)
        : all_(all), x_(x), dim_(dim), scratch_(pair_buffer(2 * all.group_size())) {}

    void prepare(const Group& group, Run run, Run places) {
        Pairs* free = scratch_.get();
        for (int32_t place = places.from; place < places.to; place += PATCH) {
            const bool inside = run.from < place && place + PATCH <= run.to + 1;
            const Pairs*& at = groups_[place % AMX_TILE / PATCH];
            at = inside ? all_(group, place) : free;
            if (inside) continue;
            turn_group(group, x_, dim_, place, run, free);
            free += all_.group_size();
        }
    }

    // The patch's rows d … d + 31 of the group at `place`.
    TilePair tiles(int32_t place, int64_t d) const {
        const Pairs* at = groups_[place % AMX_TILE / PATCH] + d;
        return {at, at + TILE_SIDE, TILE_BYTES};
    }

  private:
    const TurnedNodes& all_;
    const Tensor4 x_;
    const int64_t dim_;
    PairBuffer scratch_;
    const Pairs* groups_[AMX_GROUPS];
};

// A tile's groups of nodes as they are, or copied where rows aren't whole tiles or the sequence ends.
class NodeTile {
  public:
    NodeTile(const Problem& problem, const Tensor4& x, int64_t dim)
        : nodes_(int32_t(problem.Lk)), x_(x), dim_(dim), row_(whole_patches(dim)),
          scratch_(buffer(AMX_TILE * row_ / 2)) {}

    void prepare(const Group& group, Run nodes) {
        for (int32_t node = nodes.from; node < nodes.to; node += PATCH) {
            At& at = groups_[node % AMX_TILE / PATCH];
            if (dim_ == row_ && node + PATCH <= nodes_) {
                at = {group.node_of<const bfloat16>(x_, node), x_.row};
                continue;
            }
            bfloat16* copy = reinterpret_cast<bfloat16*>(scratch_.get()) + node % AMX_TILE * row_;
            at = {copy, row_};
            std::memset(copy, 0, PATCH * row_ * sizeof(bfloat16));
            for (int32_t i = node; i < std::min(node + PATCH, nodes_); i++, copy += row_)
                std::memcpy(copy, group.node_of<const bfloat16>(x_, i), dim_ * sizeof(bfloat16));
        }
    }

    // Scores of all nodes in [nodes.from, nodes.to), whole groups, for two vectors of lanes: each has AMX_TILE rows.
    void scores(Run nodes, const Pairs* lanes, float* scores) const {
        for (int32_t node = nodes.from; node < nodes.to; node += PATCH) {
            const At at = groups_[node % AMX_TILE / PATCH];
            float* to = scores + node % AMX_TILE * WIDTH;
            patch<false>(
                row_ / TILE_DEPTH,
                [&](int64_t k) CSA_LAMBDA {
                    const bfloat16* rows = at.rows + k * TILE_DEPTH;
                    return TilePair{rows, rows + TILE_SIDE * at.stride, at.stride * int64_t(sizeof(bfloat16))};
                },
                [&](int64_t k) CSA_LAMBDA {
                    const Pairs* columns = lanes + k * TILE_SIDE;
                    return TilePair{columns, columns + row_ / 2, TILE_BYTES};
                },
                square(to, to + AMX_TILE * WIDTH));
        }
    }

    // 32 rows of 16 numbers at `left` and as many at `right`.
    static Patch square(float* left, float* right) {
        return {left, right, left + TILE_SIDE * WIDTH, right + TILE_SIDE * WIDTH, TILE_BYTES};
    }

  private:
    struct At {
        const bfloat16* rows;
        int64_t stride;
    };
    const int32_t nodes_;
    const Tensor4 x_;
    const int64_t dim_, row_;
    Buffer scratch_;
    At groups_[AMX_GROUPS];
};

// sums[vector][dims][16 lanes] += turned nodes · weights, over the groups of `places`; weights are [place / 2][16 lanes]
// pairs, with AMX_TILE / 2 rows per vector.
inline void add_over_nodes(const TurnedTile& nodes, Run places, int64_t dims, const Pairs* weights, float* sums) {
    for (int64_t d = 0; d < dims; d += PATCH)
        patch<true>(
            (places.to - places.from) / PATCH,
            [&](int64_t k) CSA_LAMBDA { return nodes.tiles(places.from + int32_t(k) * PATCH, d); },
            [&](int64_t k) CSA_LAMBDA {
                const Pairs* at = weights + (places.from % AMX_TILE + k * PATCH) / 2;
                return TilePair{at, at + AMX_TILE / 2, TILE_BYTES};
            },
            NodeTile::square(sums + d * WIDTH, sums + (dims + d) * WIDTH));
}

// What the lanes of one vector see, as a Panel says it for all.
struct VectorOfLanes {
    Run hull, inner;
    VectorOfLanes() = default;
    VectorOfLanes(const Block& block, int v) : hull{0, 0}, inner{0, 0} {
        const Panel& panel = block.panels[0];
        if (panel.hull.empty()) return;
        hull = {INT32_MAX, 0}, inner = {0, INT32_MAX};
        bool has_end = block.group.problem.end_lengths.data != nullptr;
        for (int i = v * WIDTH; i < (v + 1) * WIDTH; i++) has_end |= panel.end[i] != 0;
        for (int i = v * WIDTH; i < (v + 1) * WIDTH; i++) {
            hull = {std::min(hull.from, panel.lo[i]), std::max(hull.to, panel.hi[i])};
            inner = {std::max(inner.from, panel.lo[i] + 1), std::min(inner.to, panel.hi[i] - has_end)};
        }
    }
};

// A vector's share of a tile: the nodes to walk along, and the place for what the last of them has got, if it is here.
struct Stretch {
    Run nodes;
    bool closes;
    Run places() const { return {nodes.from, nodes.to + closes}; }

    Stretch(Run hull, Run run, int32_t tile) {
        const Run path = intersection(hull, run);
        nodes = intersection(path, {tile, tile + AMX_TILE});
        closes = !path.empty() && tile <= path.to && path.to < tile + AMX_TILE;
        if (nodes.empty()) nodes = {path.to, path.to};
    }
};

inline Run hull_of(Run a, Run b) {
    if (a.empty()) return b;
    if (b.empty()) return a;
    return {std::min(a.from, b.from), std::max(a.to, b.to)};
}

// The nodes in order: those where some lane's path begins or ends and the odd ones out by one(edge, i), the others as
// two(i) for i and i + 1, i even.
template <class One, class Two>
CSA_INLINE void for_each_pair(Run run, Run inner, const One& one, const Two& two) {
    const auto [from, to] = inner_part(run, inner);
    const std::true_type edge;
    const std::false_type between;
    int32_t i = run.from;
    for (; i < from; i++) one(edge, i);
    if (i % 2 && i < to) one(between, i++);
    for (; i + 2 <= to; i += 2) two(i);
    if (i < to) one(between, i++);
    for (; i < run.to; i++) one(edge, i);
}

// Zeros in the rows of pairs from place `from` to place `to`, the halves of the outer ones too.
inline void clear_pairs(Pairs* pairs, int32_t from, int32_t to) {
    for (int32_t i = from / 2; i < (to + 1) / 2; i++) store(pairs[i], Bits{});
}
// One place in rows of pairs of places; the other half of the pair stays.
CSA_INLINE void store_place(Pairs* pairs, int32_t place, Bits rounded) {
    Pairs& at = pairs[place / 2];
    store(at, place % 2 ? as_high(rounded) | (load(at) & 0xffff) : as_low(rounded) | as_high(load(at)));
}

}  // namespace continuous_attention
