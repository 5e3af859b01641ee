// The forward pass: out and lse of every query, tile after tile of nodes, without storing the scores.
//
// A panel of lanes walks down the nodes. The weight of node i - 1 is known when segment i is, so each tile's weights
// belong to the nodes one before its own, and what the last segment gives to its later node is carried on.
#pragma once

#include "decode.h"
#include "path.h"
#include "result.h"
#include "threads.h"

namespace continuous_attention {

// What a vector of lanes carries from node to node. Weights are relative to 2^reference.
struct Walk {
    Vec reference;
    Node before;
    Vec right;  // what the node before has got from its own segment
    Vec total;  // sum of the weights so far, without the start node's
    Vec start_score, start_weight;
};

// The highest of `highest` and the scores of nodes that have a weight.
template <bool LENGTHS, class Scores>
CSA_INLINE Vec highest_score(const Path& path, const Column& at, Run inner, Run run, Vec highest, const Scores& score) {
    auto at_edge = [&](int32_t i) CSA_LAMBDA {
        Int row = broadcast(i), visible = (at.lo <= row) & (row < at.hi);
        if (LENGTHS) {
            // A node with no length on either side, and nothing held on it, has no weight.
            Int before = path.lengths[i] > 0 ? at.lo < row : Int{};
            Int after = i + 1 < path.nodes && path.lengths[i + 1] > 0 ? row + 1 < at.hi : Int{};
            Int held = path.start_length > 0 ? at.start == row : Int{};
            visible &= before | after | held | ((row + 1 == at.hi) & (at.end > 0));
        }
        highest = visible ? maximum(highest, score(i)) : highest;
    };
    // Several maxima, so that none waits for the one before.
    constexpr int CHAINS = 4;
    Vec others[CHAINS] = {highest, highest, highest, highest};
    const auto [from, to] = inner_part(run, inner);
    int32_t i = run.from;
    for (; i < from; i++) at_edge(i);
    if (!LENGTHS)
        for (; i + CHAINS <= to; i += CHAINS)
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; c++) others[c] = maximum(others[c], score(i + c));
    for (; i < to; i++) {
        if (LENGTHS && path.lengths[i] == 0) at_edge(i);
        else highest = maximum(highest, score(i));
    }
    for (; i < run.to; i++) at_edge(i);
    for (Vec other : others) highest = maximum(highest, other);
    return highest;
}

// One step down the path, to node i: returns the weight of node i - 1.
template <bool EDGE, bool LENGTHS, Digits DIGITS = Digits::all>
CSA_INLINE Vec step(Walk& walk, const Path& path, const Column& at, int32_t i, Vec score) {
    if (LENGTHS) score = minimum(walk.reference + CEILING, score);  // in this order a NaN stays
    const Node here = node<DIGITS>(score, walk.reference);
    Node start{};
    if (EDGE && path.has_start_node) start = node(walk.start_score, walk.reference);
    const Segment s = segment_to<EDGE, LENGTHS, DIGITS>(path, at, i, walk.before, here, start);
    Vec left = s.left;
    if (EDGE && path.has_start_node) {
        walk.start_weight += s.first ? left : Vec{};
        left = s.first ? Vec{} : left;
    }
    const Vec weight = walk.right + left;
    walk.before = here, walk.right = s.right, walk.total += weight;
    return weight;
}

// The weight of the last node, where the path ends.
CSA_INLINE Vec last_weight(Walk& walk) {
    const Vec weight = walk.right;
    walk.right = Vec{}, walk.total += weight;
    return weight;
}

// Lifts the reference to `highest` where it lies far below. If it did anywhere, `factor` is what weights so far become
// less by, and those that the walk doesn't hold still have to be multiplied by it.
CSA_INLINE bool raise_reference(Walk& walk, Vec highest, Vec& factor) {
    const Int rises = highest > walk.reference + SLACK;
    if (!any(rises)) return false;
    const Vec reference = rises ? highest : walk.reference;
    factor = rises ? quarter_exp2(walk.reference - reference) * 4.0f : broadcast(1.0f);
    walk.reference = reference;
    walk.before.p *= factor, walk.right *= factor, walk.total *= factor, walk.start_weight *= factor;
    return true;
}

// Turns the scores of `run` into weights, in place, for one vector of lanes; row i holds node i's score before and
// node i - 1's weight after. `out` has `dim` rows that follow the reference.
template <bool LENGTHS>
inline void weigh(Walk& walk, const Path& path, const Panel& panel, int v, Run run, float* scores, float* out,
                  int64_t dim) {
    const Column at(panel, v);
    auto row = [&](int32_t i) CSA_LAMBDA { return scores + (i - run.from) * PANEL; };
    const Vec highest = highest_score<LENGTHS>(path, at, panel.inner, run, walk.reference,
                                               [&](int32_t i) CSA_LAMBDA { return load(row(i)); });
    if (Vec factor; raise_reference(walk, highest, factor))
        for (int64_t d = 0; d < dim; d++) store(out + d * PANEL, factor * load(out + d * PANEL));
    Walk w = walk;
    w.total = Vec{};  // a sum of its own for every tile: one long sum would lose digits
    for_each_node(
        run, panel.inner,
        [&](int32_t i) CSA_LAMBDA { store(row(i), step<true, LENGTHS>(w, path, at, i, load(row(i)))); },
        [&](int32_t i) CSA_LAMBDA { store(row(i), step<false, LENGTHS>(w, path, at, i, load(row(i)))); });
    w.total += walk.total;
    walk = w;
}

template <class T>
class Forward {
  public:
    // What all jobs share: nothing.
    struct Shared {};
    static Shared share(const Problem&) { return {}; }

    Forward(const Problem& problem, Shared)
        : problem_(problem),
          tile_(tile_size(problem)),
          query_(buffer(BLOCK * problem.D)),
          out_(buffer(BLOCK * problem.Dv)),
          scores_(buffer(BLOCK * (tile_ + 1))),
          keys_(buffer(tile_ * problem.D)),
          values_(buffer((tile_ + 1) * problem.Dv)),
          sums_(buffer(problem.Dv)) {}

    // Gives put(row, integrals) for the rows of the block.
    template <class Put>
    void operator()(const Group& group, int64_t first_row, Run piece, const Put& put) {
        Block block(group, first_row, piece, [](int64_t) { return false; });
        pack_lanes<T>(block, problem_.query, problem_.D, problem_.scale * LOG2E, query_.get());
        std::fill_n(out_.get(), block.panels_in_use * PANEL * problem_.Dv, 0.0f);
        begin(block);
        for (Run run : block.runs)
            for (int32_t from = run.from; from < run.to; from += tile_)
                tile_of_nodes(block, run, {from, std::min(run.to, from + tile_)});
        finish(block, piece, put);
    }

  private:
    const Problem& problem_;
    const int32_t tile_;
    Buffer query_, out_, scores_, keys_, values_, sums_;
    Walk walks_[PANELS][TILE_VECTORS];

    float* out_of(int p) { return out_.get() + p * problem_.Dv * PANEL; }
    float* query_of(int p) { return query_.get() + p * problem_.D * PANEL; }
    float* scores_of(int p) { return scores_.get() + p * (tile_ + 1) * PANEL; }

    void begin(const Block& block) {
        for (int p = 0; p < block.panels_in_use; p++) {
            alignas(64) float start_scores[PANEL] = {};
            if (problem_.start_key)
                tile<1, false>(Matrix{block.group.start_key(), 0}, query_of(p), PANEL,
                               start_scores, 0, problem_.D, query_of(p));
            for (int v = 0; v < TILE_VECTORS; v++) {
                Walk& walk = walks_[p][v];
                walk = Walk{};
                walk.start_score = load(start_scores + v * WIDTH);
                Int starts = load(block.panels[p].start + v * WIDTH) != NEVER;
                if (!problem_.start_key) starts = Int{};
                walk.reference = starts ? walk.start_score : broadcast(-1e30f);
            }
        }
    }

    void tile_of_nodes(const Block& block, Run run, Run tile) {
        const Group& group = block.group;
        const Path path(group);
        // What each panel sees of the tile; where its path begins, and where it ends.
        struct Part {
            Run seen;
            bool opens, closes;
        } parts[PANELS];
        for (int p = 0; p < block.panels_in_use; p++) {
            const Run hull = block.panels[p].hull, seen = {std::max(tile.from, hull.from), std::min(tile.to, hull.to)};
            parts[p] = {seen, seen.from == std::max(run.from, hull.from), seen.to == std::min(run.to, hull.to)};
        }

        Matrix keys = nodes<T>(group, problem_.key, tile, problem_.D, keys_.get());
        for (int p = 0; p < block.panels_in_use; p++) {
            const Run seen = parts[p].seen;
            if (seen.empty()) continue;
            product<false>(seen.to - seen.from, problem_.D, keys.from_row(seen.from - tile.from), query_of(p), PANEL,
                           scores_of(p), PANEL, soon(keys, tile, p, block.panels_in_use));
        }

        for (int p = 0; p < block.panels_in_use; p++) {
            const Run seen = parts[p].seen;
            if (seen.empty()) continue;
            for (int v = 0; v < TILE_VECTORS; v++) {
                Walk& walk = walks_[p][v];
                float *scores = scores_of(p) + v * WIDTH, *out = out_of(p) + v * WIDTH;
                if (path.lengths) weigh<true>(walk, path, block.panels[p], v, seen, scores, out, problem_.Dv);
                else weigh<false>(walk, path, block.panels[p], v, seen, scores, out, problem_.Dv);
                if (parts[p].closes) store(scores + (seen.to - seen.from) * PANEL, last_weight(walk));
            }
        }

        // Weights belong to the nodes one before; where a path begins there is none.
        const Run weighed = {std::max(tile.from - 1, run.from), tile.to};
        Matrix values = nodes<T>(group, problem_.value, weighed, problem_.Dv, values_.get());
        for (int p = 0; p < block.panels_in_use; p++) {
            const auto [seen, opens, closes] = parts[p];
            if (seen.empty()) continue;
            product<true>(problem_.Dv, seen.to - seen.from + closes - opens,
                          values.from_row(seen.from - 1 + opens - weighed.from).transposed(),
                          scores_of(p) + opens * PANEL, PANEL, out_of(p), PANEL,
                          soon(values, tile, p, block.panels_in_use));
        }
    }

    template <class Put>
    void finish(const Block& block, Run piece, const Put& put) {
        const Group& group = block.group;
        const float* start_value = group.start_value();
        for (int lane = 0; lane < block.rows; lane++) {
            const int64_t row = block.first + lane;
            const int p = lane / PANEL, i = lane % PANEL;
            const Walk& walk = walks_[p][i / WIDTH];
            const float start = walk.start_weight[i % WIDTH], total = walk.total[i % WIDTH] + start;
            Integrals x = {walk.reference[i % WIDTH], block.blank[lane] ? 0 : total, sums_.get()};
            if (x.total == 0) {
                last_value<T>(group, row, piece, x.sums);
            } else {
                const float* out = out_of(p) + i;
                for (int64_t d = 0; d < problem_.Dv; d++)
                    x.sums[d] = out[d * PANEL] + (start_value ? start * start_value[d] : 0.0f);
            }
            put(row, x);
        }
    }
};

}  // namespace continuous_attention

#include "amx_forward.h"

namespace continuous_attention {

// What turns blocks of queries into integrals, for each dtype.
template <class T>
using ForwardOf = std::conditional_t<HAS_AMX && std::is_same_v<T, bfloat16>, AmxForward<bfloat16>, Forward<T>>;

// Cuts the nodes into pieces, so that there is work for all threads where there are few queries.
inline int64_t pieces_wanted(const Problem& problem, int64_t jobs, int64_t shortest) {
    if (problem.threads == 1 || jobs == 0) return 1;
    return std::clamp<int64_t>((problem.threads + jobs - 1) / jobs, 1, std::max<int64_t>(1, problem.Lk / shortest));
}

template <class T>
void forward_as(const Problem& problem, const Result& result) {
    const int64_t groups = problem.B * problem.Hkv, rows = problem.Hq / problem.Hkv * problem.Lq;
    const bool few = rows <= DECODE_ROWS && problem.Lk >= DECODE_NODES;
    const int64_t blocks = few ? 1 : (rows + BLOCK - 1) / BLOCK;
    Pieces pieces(problem, pieces_wanted(problem, groups * blocks, 256));
    // Jobs go piece by piece, block by block, head by head; the last rows first: under causality they take longest.
    auto work = [&](auto& run, int64_t job) {
        const Group group = group_of(problem, job / pieces.count / blocks);
        const int64_t first = (blocks - 1 - job / pieces.count % blocks) * BLOCK, i = job % pieces.count;
        const Run piece = {int32_t(problem.Lk * i / pieces.count), int32_t(problem.Lk * (i + 1) / pieces.count)};
        run(group, first, piece, [&](int64_t row, const Integrals& x) {
            if (pieces.count > 1) pieces.put(group, row, i, x);
            else write_result<T>(result, group, row, x);
        });
    };
    const int64_t jobs = rows ? groups * blocks * pieces.count : 0;
    if (few)
        for_each_job(problem.threads, jobs, [&] {
            return [&, run = Decode<T>(problem)](int64_t job) mutable { work(run, job); };
        });
    else {
        const auto shared = ForwardOf<T>::share(problem);
        for_each_job(problem.threads, jobs, [&] {
            return [&, run = ForwardOf<T>(problem, shared)](int64_t job) mutable { work(run, job); };
        });
    }
    if (pieces.count == 1) return;
    for_each_job(problem.threads, groups, [&] {
        return [&, sums = buffer(problem.Dv)](int64_t g) {
            const Group group = group_of(problem, g);
            for (int64_t row = 0; row < rows; row++)
                write_result<T>(result, group, row, pieces.merge(group, row, sums.get()));
        };
    });
}

inline void forward(const Problem& problem, const Result& result) {
    with_type(problem.dtype, [&](auto t) { forward_as<decltype(t)>(problem, result); });
}

}  // namespace continuous_attention
