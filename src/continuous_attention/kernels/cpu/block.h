// A block of query rows: which nodes its lanes see, and the memory that it works in.
//
// All query heads that share a key/value head form one list of rows, query by query (row = query · G + head, G heads
// per group), so that keys and values are read once for all of them. A block takes BLOCK rows of it as lanes, in panels
// of PANEL: tiles of scores are stored transposed, [nodes][lanes], so that a node's neighbour is the row above and no
// lane ever looks at another one.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "problem.h"
#include "product.h"

namespace continuous_attention {

// A tile of keys and values is read, and converted from half precision, once per block.
constexpr int BLOCK = WIDTH == 16 ? 64 : 128;
constexpr int PANELS = BLOCK / PANEL;
constexpr int32_t NEVER = -1;

// Nodes per tile: a tile of keys or values fills most of the first-level cache, and is read once per panel.
inline int32_t tile_size(const Problem& problem) {
    return int32_t(std::clamp<int64_t>(6144 / std::max(problem.D, problem.Dv) / TILE_ROWS * TILE_ROWS, 12, 96));
}

struct Free {
    void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float[], Free>;

// Memory for `count` floats, aligned for every vector, not initialised.
inline Buffer buffer(int64_t count) {
    size_t bytes = (size_t(count) * sizeof(float) + 63) / 64 * 64;
    void* p = std::aligned_alloc(64, std::max<size_t>(bytes, 64));
    if (!p) throw std::bad_alloc();
    return Buffer(static_cast<float*>(p));
}

// The nodes [from, to).
struct Run {
    int32_t from, to;
    bool empty() const { return to <= from; }
};

// What is in a piece of a path: its nodes, and whether the path's beginning and its end are.
struct Part {
    Run seen;
    bool starts, ends;
};

// The key/value head, its batch element, and the rows of its group.
struct Group {
    const Problem& problem;
    int64_t batch, key_head;

    // Its place among all of them.
    int64_t index() const { return batch * problem.Hkv + key_head; }
    int64_t heads() const { return problem.Hq / problem.Hkv; }
    int64_t rows() const { return heads() * problem.Lq; }
    int64_t query(int64_t row) const { return row / heads(); }
    int64_t head(int64_t row) const { return key_head * heads() + row % heads(); }
    // The index of a row in a contiguous (B, Hq, Lq).
    int64_t flat(int64_t row) const { return (batch * problem.Hq + head(row)) * problem.Lq + query(row); }

    Run sees(int64_t row) const {
        const int32_t* interval = problem.intervals.data + batch * problem.intervals.batch + 2 * query(row);
        return {interval[0], interval[1]};
    }
    // What the row sees of a piece of the nodes: the segments that end at them, so one node more where the path comes
    // from before.
    Part part_of(int64_t row, Run piece) const {
        const Run path = sees(row);
        if (path.empty() || path.to <= piece.from || path.from >= piece.to) return {{0, 0}, false, false};
        const bool starts = path.from >= piece.from;
        return {{starts ? path.from : piece.from - 1, std::min(path.to, piece.to)}, starts, path.to <= piece.to};
    }
    float end_length(int64_t row) const {
        const auto& given = problem.end_lengths;
        return given.data ? given.data[batch * given.batch + query(row)] : problem.end_length;
    }
    const float* lengths() const {
        return problem.lengths.data ? problem.lengths.data + batch * problem.lengths.batch : nullptr;
    }
    // The node before the first visible one; null where there is none.
    const float* start_key() const { return problem.start_key ? problem.start_key + key_head * problem.D : nullptr; }
    const float* start_value() const {
        return problem.start_value ? problem.start_value + key_head * problem.Dv : nullptr;
    }
    template <class T>
    T* row_of(const Tensor4& x, int64_t row) const {
        return static_cast<T*>(x.data) + batch * x.batch + head(row) * x.head + query(row) * x.row;
    }
    template <class T>
    T* node_of(const Tensor4& x, int64_t node) const {
        return static_cast<T*>(x.data) + batch * x.batch + key_head * x.head + node * x.row;
    }
};

inline Group group_of(const Problem& problem, int64_t index) {
    return {problem, index / problem.Hkv, index % problem.Hkv};
}

// What the lanes of one panel see, and which nodes need a closer look.
struct Panel {
    alignas(64) int32_t lo[PANEL], hi[PANEL];  // the nodes [lo, hi)
    alignas(64) int32_t start[PANEL];          // the node that what lies before the path joins, or NEVER
    alignas(64) float end[PANEL];              // the mass held at the last node
    Run hull;                                  // the nodes that any lane sees
    Run inner;                                 // the nodes whose segment all lanes integrate, and nothing else
};

// The nodes of `run` whose segments all lanes integrate, and nothing else; the others come before and after them.
inline Run inner_part(Run run, Run inner) {
    const int32_t from = std::clamp(inner.from, run.from, run.to);
    return {from, std::clamp(inner.to, from, run.to)};
}

struct Block {
    Group group;
    int64_t first;      // row of lane 0
    int rows;           // lanes in use
    int panels_in_use;
    bool blank[BLOCK];  // lanes without a row, or whose row sees nothing: computed with a zero query, and discarded
    Panel panels[PANELS];  // the first `panels_in_use` of them
    std::vector<Run> runs;  // the nodes that any lane sees, in order and apart

    // `piece` is the part of the path to look at: the segments that end at its nodes.
    // Rows for which `skip(row)` holds are taken as seeing nothing.
    template <class Skip>
    Block(Group group, int64_t first, Run piece, const Skip& skip)
        : group(group),
          first(first),
          rows(int(std::min<int64_t>(BLOCK, group.rows() - first))),
          panels_in_use((rows + PANEL - 1) / PANEL) {
        Run seen[BLOCK];
        int32_t starts[BLOCK];
        float ends[BLOCK];
        // Given lengths may be 0, but have a gradient all the same.
        bool has_end = group.problem.end_lengths.data != nullptr;
        for (int lane = 0; lane < panels_in_use * PANEL; lane++) {
            Part part{};
            if (lane < rows && !skip(first + lane)) part = group.part_of(first + lane, piece);
            blank[lane] = part.seen.empty();
            if (blank[lane]) continue;
            seen[lane] = part.seen;
            starts[lane] = part.starts ? part.seen.from : NEVER;
            ends[lane] = part.ends ? group.end_length(first + lane) : 0;
            has_end |= ends[lane] != 0;
            runs.push_back(part.seen);
        }
        join_overlapping(runs);
        for (int p = 0; p < panels_in_use; p++) fill(panels[p], p * PANEL, seen, starts, ends, has_end);
    }

  private:
    // Blank lanes follow another lane of their panel, so that they don't make nodes look like the edge of something.
    void fill(Panel& panel, int lane0, const Run* seen, const int32_t* starts, const float* ends, bool has_end) {
        panel.hull = {INT32_MAX, 0};
        panel.inner = {0, INT32_MAX};
        int model = lane0;
        while (model < lane0 + PANEL && blank[model]) model++;
        if (model == lane0 + PANEL) {
            panel.hull = {0, 0};
            return;
        }
        for (int i = 0; i < PANEL; i++) {
            int lane = blank[lane0 + i] ? model : lane0 + i;
            Run run = seen[lane];
            panel.lo[i] = run.from, panel.hi[i] = run.to, panel.start[i] = starts[lane], panel.end[i] = ends[lane];
            panel.hull = {std::min(panel.hull.from, run.from), std::max(panel.hull.to, run.to)};
            panel.inner = {std::max(panel.inner.from, run.from + 1), std::min(panel.inner.to, run.to - has_end)};
        }
    }

    static void join_overlapping(std::vector<Run>& runs) {
        std::sort(runs.begin(), runs.end(), [](Run a, Run b) { return a.from < b.from; });
        size_t kept = 0;
        for (Run run : runs) {
            if (kept && run.from <= runs[kept - 1].to) runs[kept - 1].to = std::max(runs[kept - 1].to, run.to);
            else runs[kept++] = run;
        }
        runs.resize(kept);
    }
};

// Writes a block's rows transposed, [panel][dim][PANEL], times `factor`; blank lanes are 0.
template <class T>
inline void pack_lanes(const Block& block, const Tensor4& x, int64_t dim, float factor, float* packed) {
    for (int lane = 0; lane < block.panels_in_use * PANEL; lane++) {
        float* to = packed + lane / PANEL * dim * PANEL + lane % PANEL;
        if (block.blank[lane]) {
            for (int64_t d = 0; d < dim; d++) to[d * PANEL] = 0;
            continue;
        }
        const T* from = block.group.row_of<const T>(x, block.first + lane);
        for (int64_t d = 0; d < dim; d++) to[d * PANEL] = factor * to_float(from[d]);
    }
}

// Rows of keys or values as float32: where they are, or in `scratch` if they are stored in half precision or far apart
// (rows whose distance is a power of two would fight for the same places in the cache).
template <class T>
inline Matrix nodes(const Group& group, const Tensor4& x, Run run, int64_t dim, float* scratch) {
    const T* from = group.node_of<const T>(x, run.from);
    if constexpr (std::is_same_v<T, float>)
        if (x.row == dim) return {from, dim};
    for (int64_t i = 0; i < run.to - run.from; i++) read(from + i * x.row, scratch + i * dim, dim);
    return {scratch, dim};
}

// While panel p of `panels` is worked on, its share of the rows after the tile is fetched.
inline const float* soon(Matrix rows, Run tile, int p, int panels) {
    const int64_t n = tile.to - tile.from;
    return rows.data + n * rows.stride + n * rows.stride * p / panels;
}

// Calls f with a value of the C++ type that a dtype names.
template <class F>
inline void with_type(DType dtype, const F& f) {
    switch (dtype) {
        case DType::float32: return f(float{});
        case DType::bfloat16: return f(bfloat16{});
        case DType::float16: return f(float16{});
    }
}

}  // namespace continuous_attention
