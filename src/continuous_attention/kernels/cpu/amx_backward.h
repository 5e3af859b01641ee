// The backward pass of bfloat16 on AMX: the way down of backward.h between products of tiles (amx_pack.h has the
// layouts). Weights and gradients of scores are rounded to bfloat16 for the products, so few digits are enough for them.
//
// Both are written for the sums over lanes, [half][place][16 lanes] pairs of the half's two vectors; the gradients of
// scores a second time for the sums over nodes, [vector][place / 2][16 lanes].
#pragma once

#include "amx_pack.h"
#include "path.h"

namespace continuous_attention {

template <class T>
class AmxBackward {
    static_assert(std::is_same_v<T, bfloat16>);

  public:
    // What all jobs share: the keys, turned.
    using Shared = TurnedNodes;
    static Shared share(const Problem& problem) { return TurnedNodes(problem, problem.key, problem.D); }

    AmxBackward(const Problem& problem, const Gradients& gradients, const Shared& keys)
        : problem_(problem),
          gradients_(gradients),
          dims_(whole_patches(problem.D)),
          value_dims_(whole_patches(problem.Dv)),
          keys_(problem, problem.key, problem.D),
          values_(problem, problem.value, problem.Dv),
          turned_keys_(keys, problem.key, problem.D),
          query_lanes_(pair_buffer(AMX_VECTORS * dims_ / 2)),
          out_lanes_(pair_buffer(AMX_VECTORS * value_dims_ / 2)),
          query_rows_(pair_buffer(AMX_HALVES * dims_)),
          out_rows_(pair_buffer(AMX_HALVES * value_dims_)),
          query_gradient_(buffer(BLOCK * dims_)),
          scores_(buffer(std::max<int64_t>(2 * AMX_TILE, dims_) * WIDTH)),
          products_(buffer(2 * AMX_TILE * WIDTH)),
          weights_(pair_buffer(AMX_HALVES * AMX_TILE)),
          score_gradients_(pair_buffer(AMX_HALVES * AMX_TILE)),
          gradient_pairs_(pair_buffer(AMX_TILE)),
          row_(buffer(std::max(dims_, value_dims_))) {}

    void operator()(const Group& group, int64_t first_row, Sums& sums) {
        const Tiles tiles;
        // A path without length has the value of its last node, and nothing else has a gradient.
        auto without_length = [&](int64_t row) { return gradients_.normalizer[2 * group.flat(row) + 1] == 0; };
        const Block block(group, first_row, {0, int32_t(problem_.Lk)}, without_length);
        const Rows queries(block, problem_.query), out_gradients(block, gradients_.out_gradient);
        pack_lanes(queries, problem_.D, query_lanes_.get());
        pack_lanes(out_gradients, problem_.Dv, out_lanes_.get());
        pack_rows(queries, problem_.D, query_rows_.get());
        pack_rows(out_gradients, problem_.Dv, out_rows_.get());
        std::fill_n(query_gradient_.get(), BLOCK * dims_, 0.0f);
        begin(block, queries, out_gradients, sums);
        for (Run run : block.runs)
            for (int32_t tile = run.from / AMX_TILE * AMX_TILE; tile <= run.to; tile += AMX_TILE)
                tile_of_nodes(block, run, tile, sums);
        finish(block, queries, out_gradients, sums);
    }

    // After the last block: queries are summed up without their scale, so that they stay what they are in bfloat16.
    void close(Sums& sums) {
        for (int64_t i = 0; i < problem_.Lk * sums.key_row; i++) sums.key(0)[i] *= problem_.scale;
        for (int64_t i = 0; i < sums.key_row; i++) sums.start_key()[i] *= problem_.scale;
    }

  private:
    struct Lanes : VectorOfLanes {
        Descent descent;
    };

    const Problem& problem_;
    const Gradients& gradients_;
    const int64_t dims_, value_dims_;
    NodeTile keys_, values_;
    TurnedTile turned_keys_;
    PairBuffer query_lanes_, out_lanes_, query_rows_, out_rows_;
    Buffer query_gradient_, scores_, products_;
    PairBuffer weights_, score_gradients_, gradient_pairs_;
    Buffer row_;
    Lanes lanes_[AMX_VECTORS];

    float* query_gradient_of(int v) { return query_gradient_.get() + v * dims_ * WIDTH; }

    void begin(const Block& block, const Rows& queries, const Rows& out_gradients, Sums& sums) {
        const Group& group = block.group;
        alignas(64) float reference[BLOCK] = {}, mean[BLOCK] = {}, start_score[BLOCK] = {}, start_g[BLOCK] = {};
        for (int lane = 0; lane < block.rows; lane++) {
            const int64_t row = block.first + lane, flat = group.flat(row);
            if (block.blank[lane]) {
                const Run seen = group.sees(row);
                if (seen.empty()) continue;
                read(group.row_of<const T>(gradients_.out_gradient, row), row_.get(), problem_.Dv);
                float* last = sums.value(seen.to - 1);
                for (int64_t d = 0; d < problem_.Dv; d++) last[d] += row_[d];
                continue;
            }
            const T* rest =
                gradients_.out_rest ? static_cast<const T*>(gradients_.out_rest) + flat * problem_.Dv : nullptr;
            mean[lane] =
                dot_of(out_gradients.row[lane], group.row_of<const T>(gradients_.out, row), problem_.Dv) +
                (rest ? dot_of(out_gradients.row[lane], rest, problem_.Dv) : 0.0f) -
                (gradients_.lse_gradient ? gradients_.lse_gradient[flat] : 0.0f);
            reference[lane] = gradients_.normalizer[2 * flat] + std::log2(gradients_.normalizer[2 * flat + 1]);
        }
        if (problem_.start_key) {
            dots(queries, group.start_key(), problem_.D, problem_.scale * LOG2E, start_score);
            dots(out_gradients, group.start_value(), problem_.Dv, 1.0f, start_g);
        }
        for (int v = 0; v < AMX_VECTORS; v++) {
            lanes_[v] = {VectorOfLanes(block, v), Descent{}};
            Descent& d = lanes_[v].descent;
            d.reference = load(reference + v * WIDTH), d.mean = load(mean + v * WIDTH);
            d.start = node<Digits::few>(load(start_score + v * WIDTH), d.reference);
            d.start_g = load(start_g + v * WIDTH) - d.mean;
        }
    }

    void tile_of_nodes(const Block& block, Run run, int32_t tile, Sums& sums) {
        const Run places = intersection({run.from, run.to + 1}, {tile, tile + AMX_TILE});
        const Run nodes = whole_groups(intersection(run, places));
        keys_.prepare(block.group, nodes);
        values_.prepare(block.group, nodes);
        turned_keys_.prepare(block.group, run, whole_groups(places));
        const Path path(block.group);
        Run seen[AMX_HALVES];
        for (int h = 0; h < AMX_HALVES; h++) {
            const int v = 2 * h;
            const Stretch first(lanes_[v].hull, run, tile), second(lanes_[v + 1].hull, run, tile);
            seen[h] = whole_groups(hull_of(first.places(), second.places()));
            if (seen[h].empty()) continue;
            const Run walked = whole_groups(hull_of(first.nodes, second.nodes));
            keys_.scores(walked, query_lanes_.get() + v * dims_ / 2, scores_.get());
            values_.scores(walked, out_lanes_.get() + v * value_dims_ / 2, products_.get());
            if (path.lengths) {
                descend_along<true, 0>(path, block.panels[0], v, tile, seen[h], first, sums);
                descend_along<true, 1>(path, block.panels[0], v + 1, tile, seen[h], second, sums);
            } else {
                descend_along<false, 0>(path, block.panels[0], v, tile, seen[h], first, sums);
                descend_along<false, 1>(path, block.panels[0], v + 1, tile, seen[h], second, sums);
            }
            add_over_nodes(turned_keys_, seen[h], dims_, gradient_pairs_.get(), query_gradient_of(v));
        }
        // Place 0 of the tile belongs to the node before it.
        add_over_lanes(tile, seen, weights_.get(), out_rows_.get(), value_dims_, sums.value(tile - 1), sums.value_row);
        add_over_lanes(tile, seen, score_gradients_.get(), query_rows_.get(), dims_, sums.key(tile - 1), sums.key_row);
    }

    // Turns scores and products with dO into weights and gradients of scores, for one vector of lanes. `seen` are the
    // places that will be read; SIDE says which of the half's vectors it is: the first one is to come first.
    template <bool LENGTHS, int SIDE>
    void descend_along(const Path& path, const Panel& panel, int v, int32_t tile, Run seen, const Stretch& stretch,
                       Sums& sums) {
        const Run nodes = stretch.nodes, places = stretch.places();
        const float *scores = scores_.get() + SIDE * AMX_TILE * WIDTH,
                    *products = products_.get() + SIDE * AMX_TILE * WIDTH;
        Pairs *weights = weights_.get() + v / 2 * AMX_TILE, *gradients = score_gradients_.get() + v / 2 * AMX_TILE,
              *pairs = gradient_pairs_.get() + SIDE * AMX_TILE / 2;
        if (SIDE == 0)
            for (int32_t i = seen.from; i < seen.to; i++)
                if (i < places.from || i >= places.to) {
                    store(weights[i - tile], Bits{});
                    store(gradients[i - tile], Bits{});
                }
        if (places.empty()) return clear_pairs(pairs, seen.from - tile, seen.to - tile);
        clear_pairs(pairs, seen.from - tile, nodes.from - tile + 1);
        clear_pairs(pairs, nodes.to - tile, seen.to - tile);

        const Column at(panel, v);
        const float factor = problem_.scale * LOG2E;
        Descent d = lanes_[v].descent;
        auto row_of = [&](auto edge, int32_t i) CSA_LAMBDA {
            const Vec score = load(scores + (i - tile) * WIDTH) * factor, product = load(products + (i - tile) * WIDTH);
            const Row row = descend<edge, LENGTHS, Digits::few>(d, path, at, i, score, product);
            if (LENGTHS) sums.lengths()[i] += sum(row.length_gradient);
            return row;
        };
        auto put = [&](Pairs& to, Bits rounded) CSA_LAMBDA {
            store(to, SIDE == 0 ? as_low(rounded) : load(to) | as_high(rounded));
        };
        const std::false_type between;
        for_each_pair(
            nodes, lanes_[v].inner,
            [&](auto edge, int32_t i) CSA_LAMBDA {
                const Row row = row_of(edge, i);
                const Bits gradient = rounded(row.gradient);
                put(weights[i - tile], rounded(row.weight));
                put(gradients[i - tile], gradient);
                store_place(pairs, i - tile, gradient);
            },
            [&](int32_t i) CSA_LAMBDA {
                const Row even = row_of(between, i), odd = row_of(between, i + 1);
                const Bits even_gradient = rounded(even.gradient), odd_gradient = rounded(odd.gradient);
                put(weights[i - tile], rounded(even.weight));
                put(weights[i - tile + 1], rounded(odd.weight));
                put(gradients[i - tile], even_gradient);
                put(gradients[i - tile + 1], odd_gradient);
                store(pairs[(i - tile) >> 1], as_low(even_gradient) | as_high(odd_gradient));
            });
        if (stretch.closes) {
            const Int ends = at.hi == nodes.to;
            const Bits gradient = rounded(ends ? d.right * d.g - d.c : Vec{});
            put(weights[nodes.to - tile], rounded(d.right));
            put(gradients[nodes.to - tile], gradient);
            store_place(pairs, nodes.to - tile, gradient);
            d.right = d.c = Vec{};
        }
        lanes_[v].descent = d;
    }

    // sums[place][dims] += weightsᵀ rows, for the places that a half sees.
    static void add_over_lanes(int32_t tile, const Run (&seen)[AMX_HALVES], const Pairs* weights, const Pairs* rows,
                               int64_t dims, float* sums, int64_t stride) {
        const Run all = hull_of(seen[0], seen[1]);
        for (int32_t place = all.from; place < all.to; place += PATCH) {
            auto sees = [&](int h) { return seen[h].from <= place && place < seen[h].to; };
            const int64_t from = sees(0) ? 0 : 1, to = sees(1) ? 2 : 1;
            float* const sum = sums + (place - tile) * stride;
            for (int64_t d = 0; d < dims && from < to; d += PATCH)
                patch<true>(
                    to - from,
                    [&](int64_t h) CSA_LAMBDA {
                        const Pairs* at = weights + (from + h) * AMX_TILE + (place - tile);
                        return TilePair{at, at + TILE_SIDE, TILE_BYTES};
                    },
                    [&](int64_t h) CSA_LAMBDA {
                        const Pairs* at = rows + (from + h) * dims + d;
                        return TilePair{at, at + TILE_SIDE, TILE_BYTES};
                    },
                    Patch{sum + d, sum + d + TILE_SIDE, sum + TILE_SIDE * stride + d,
                          sum + TILE_SIDE * stride + d + TILE_SIDE, stride * int64_t(sizeof(float))});
        }
    }

    void finish(const Block& block, const Rows& queries, const Rows& out_gradients, Sums& sums) {
        const Group& group = block.group;
        const float* start_key = group.start_key();
        for (int v = 0; v < AMX_VECTORS; v++) turn_lanes(query_gradient_of(v), dims_, scores_.get());
        for (int lane = 0; lane < block.rows; lane++) {
            const int64_t row = block.first + lane;
            const int i = lane % WIDTH;
            const Descent& descent = lanes_[lane / WIDTH].descent;
            const float start_gradient = descent.start_gradient[i], start_weight = descent.start_weight[i];
            float* gradient = query_gradient_of(lane / WIDTH) + i * dims_;
            for (int64_t d = 0; d < problem_.D; d++) {
                if (start_key) gradient[d] += start_gradient * start_key[d];
                gradient[d] = block.blank[lane] ? 0.0f : gradient[d] * problem_.scale;
            }
            write(gradient, group.row_of<T>(gradients_.query, row), problem_.D);
            if (gradients_.end_lengths)
                gradients_.end_lengths[group.flat(row)] = block.blank[lane] ? 0.0f : descent.end_gradient[i];
            if (!start_key || block.blank[lane]) continue;
            read(out_gradients.row[lane], row_.get(), problem_.Dv);
            for (int64_t d = 0; d < problem_.Dv; d++) sums.start_value()[d] += start_weight * row_[d];
            read(queries.row[lane], row_.get(), problem_.D);
            for (int64_t d = 0; d < problem_.D; d++) sums.start_key()[d] += start_gradient * row_[d];
        }
    }
};

}  // namespace continuous_attention
