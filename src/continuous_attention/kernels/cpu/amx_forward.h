// The forward pass of bfloat16 on AMX: the walk of forward.h between products of tiles (amx_pack.h has the layouts).
//
// The weights are rounded to bfloat16 for the product with the values. Dividing by the sum of the rounded ones instead
// of their own keeps out a mean of values, exactly so where one value has all the weight; lse comes from the others.
#pragma once

#include "amx_pack.h"
#include "path.h"
#include "result.h"

namespace continuous_attention {

template <class T>
class AmxForward {
    static_assert(std::is_same_v<T, bfloat16>);

  public:
    // What all jobs share: the values, turned.
    using Shared = TurnedNodes;
    static Shared share(const Problem& problem) { return TurnedNodes(problem, problem.value, problem.Dv); }

    AmxForward(const Problem& problem, const Shared& values)
        : problem_(problem),
          dims_(whole_patches(problem.D)),
          value_dims_(whole_patches(problem.Dv)),
          keys_(problem, problem.key, problem.D),
          values_(values, problem.value, problem.Dv),
          query_(pair_buffer(AMX_VECTORS * dims_ / 2)),
          out_(buffer(BLOCK * value_dims_)),
          scores_(buffer(std::max<int64_t>(2 * AMX_TILE, value_dims_) * WIDTH)),
          weights_(pair_buffer(AMX_TILE)) {}

    // Gives put(row, integrals) for the rows of the block.
    template <class Put>
    void operator()(const Group& group, int64_t first_row, Run piece, const Put& put) {
        const Tiles tiles;
        const Block block(group, first_row, piece, [](int64_t) { return false; });
        const Rows queries(block, problem_.query);
        pack_lanes(queries, problem_.D, query_.get());
        std::fill_n(out_.get(), BLOCK * value_dims_, 0.0f);
        begin(block, queries);
        for (Run run : block.runs)
            for (int32_t tile = run.from / AMX_TILE * AMX_TILE; tile <= run.to; tile += AMX_TILE)
                tile_of_nodes(block, run, tile);
        finish(block, piece, put);
    }

  private:
    // lse is wanted in float32.
    static constexpr Digits DIGITS = Digits::most;

    struct Lanes : VectorOfLanes {
        Walk walk;
        Vec rounded;  // as its total, of the weights as they were rounded
    };

    const Problem& problem_;
    const int64_t dims_, value_dims_;
    NodeTile keys_;
    TurnedTile values_;
    PairBuffer query_;
    Buffer out_, scores_;
    PairBuffer weights_;
    Lanes lanes_[AMX_VECTORS];

    float* out_of(int v) { return out_.get() + v * value_dims_ * WIDTH; }

    void begin(const Block& block, const Rows& queries) {
        alignas(64) float start_scores[BLOCK] = {};
        if (problem_.start_key)
            dots(queries, block.group.start_key(), problem_.D, problem_.scale * LOG2E, start_scores);
        for (int v = 0; v < AMX_VECTORS; v++) {
            Lanes& lanes = lanes_[v];
            lanes = {VectorOfLanes(block, v), Walk{}, Vec{}};
            lanes.walk.start_score = load(start_scores + v * WIDTH);
            Int starts = load(block.panels[0].start + v * WIDTH) != NEVER;
            if (!problem_.start_key) starts = Int{};
            lanes.walk.reference = starts ? lanes.walk.start_score : broadcast(-1e30f);
        }
    }

    void tile_of_nodes(const Block& block, Run run, int32_t tile) {
        const Run places = intersection({run.from, run.to + 1}, {tile, tile + AMX_TILE});
        keys_.prepare(block.group, whole_groups(intersection(run, places)));
        values_.prepare(block.group, run, whole_groups(places));
        const Path path(block.group);
        for (int v = 0; v < AMX_VECTORS; v += 2) {
            const Stretch stretches[2] = {{lanes_[v].hull, run, tile}, {lanes_[v + 1].hull, run, tile}};
            const Run seen = whole_groups(hull_of(stretches[0].places(), stretches[1].places()));
            if (seen.empty()) continue;
            keys_.scores(whole_groups(hull_of(stretches[0].nodes, stretches[1].nodes)), query_.get() + v * dims_ / 2,
                         scores_.get());
            for (int i = 0; i < 2; i++) {
                const float* scores = scores_.get() + i * AMX_TILE * WIDTH;
                Pairs* weights = weights_.get() + i * AMX_TILE / 2;
                if (path.lengths) weigh<true>(path, block.panels[0], v + i, tile, seen, stretches[i], scores, weights);
                else weigh<false>(path, block.panels[0], v + i, tile, seen, stretches[i], scores, weights);
            }
            add_over_nodes(values_, seen, value_dims_, weights_.get(), out_of(v));
        }
    }

    // Turns scores into weights for one vector of lanes. `seen` are the places that will be read.
    template <bool LENGTHS>
    void weigh(const Path& path, const Panel& panel, int v, int32_t tile, Run seen, const Stretch& stretch,
               const float* scores, Pairs* weights) {
        Lanes& lanes = lanes_[v];
        const Run nodes = stretch.nodes, places = stretch.places();
        if (places.empty()) return clear_pairs(weights, seen.from - tile, seen.to - tile);
        clear_pairs(weights, seen.from - tile, nodes.from - tile + 1);
        clear_pairs(weights, nodes.to - tile, seen.to - tile);

        const Column at(panel, v);
        const float factor = problem_.scale * LOG2E;
        auto score = [&](int32_t i) CSA_LAMBDA { return load(scores + (i - tile) * WIDTH) * factor; };
        const Vec highest = highest_score<LENGTHS>(path, at, lanes.inner, nodes, lanes.walk.reference, score);
        if (Vec less; raise_reference(lanes.walk, highest, less)) {
            lanes.rounded *= less;
            for (int64_t d = 0; d < value_dims_; d++)
                store(out_of(v) + d * WIDTH, less * load(out_of(v) + d * WIDTH));
        }
        Walk walk = lanes.walk;
        walk.total = Vec{};  // sums of their own for every tile: one long sum would lose digits
        Vec rounded_total{};
        auto next = [&](auto edge, int32_t i) CSA_LAMBDA {
            return rounded(step<edge, LENGTHS, DIGITS>(walk, path, at, i, score(i)));
        };
        const std::false_type between;
        for_each_pair(
            nodes, lanes.inner,
            [&](auto edge, int32_t i) CSA_LAMBDA {
                const Bits weight = next(edge, i);
                store_place(weights, i - tile, weight);
                rounded_total += std::bit_cast<Vec>(as_high(weight));
            },
            [&](int32_t i) CSA_LAMBDA {
                const Bits even = next(between, i);
                const Bits odd = next(between, i + 1);
                const Bits pair = as_low(even) | as_high(odd);
                store(weights[(i - tile) >> 1], pair);
                rounded_total = add_pairs(rounded_total, pair);
            });
        if (stretch.closes) {
            const Bits weight = rounded(last_weight(walk));
            store_place(weights, nodes.to - tile, weight);
            rounded_total += std::bit_cast<Vec>(as_high(weight));
        }
        walk.total += lanes.walk.total, rounded_total += lanes.rounded;
        lanes.walk = walk, lanes.rounded = rounded_total;
    }

    template <class Put>
    void finish(const Block& block, Run piece, const Put& put) {
        const Group& group = block.group;
        const float* start_value = group.start_value();
        for (int v = 0; v < AMX_VECTORS; v++) turn_lanes(out_of(v), value_dims_, scores_.get());
        for (int lane = 0; lane < block.rows; lane++) {
            const int64_t row = block.first + lane;
            const Lanes& lanes = lanes_[lane / WIDTH];
            const int i = lane % WIDTH;
            const float start = lanes.walk.start_weight[i], total = lanes.walk.total[i] + start;
            Integrals x = {lanes.walk.reference[i], block.blank[lane] ? 0 : total, out_of(lane / WIDTH) + i * value_dims_};
            if (x.total == 0) {
                last_value<T>(group, row, piece, x.sums);
            } else {
                const float correction = total / (lanes.rounded[i] + start);
                for (int64_t d = 0; d < problem_.Dv; d++)
                    x.sums[d] = correction * (x.sums[d] + (start_value ? start * start_value[d] : 0.0f));
            }
            put(row, x);
        }
    }
};

}  // namespace continuous_attention
