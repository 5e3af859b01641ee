// The backward pass: the scores are computed again, tile after tile, and turned into the gradients of all that went in.
//
// With g_i = dO·v_i - dO·o + dlse, and weights w, M relative to e^lse (docs/math.md §6):
//
//     c_i = M_i (g_i - g_{i-1})          dA_i = w_i g_i - c_i + c_{i+1}
//     dV = Wᵀ dO      dK = scale · dAᵀ Q      dQ = scale · dA K
//
// A job is a key/value head with some of its blocks of queries: it owns the sums for keys and values, and every query
// belongs to one job, so nothing is added up by two threads, and the order of the sums doesn't depend on them.
#pragma once

#include <cmath>

#include "amx.h"
#include "path.h"
#include "threads.h"

namespace continuous_attention {

// What queries add up: gradients of a key/value head, in one piece of memory, so that they can be added as one vector.
class Sums {
  public:
    explicit Sums(const Problem& problem)
        : key_row(whole_panels(problem.D)),
          value_row(whole_panels(problem.Dv)),
          nodes_(problem.Lk),
          size_((nodes_ + 2 * SPARE + 1) * (key_row + value_row) + (problem.lengths.data ? nodes_ : 0)),
          data_(buffer(size_)) {}

    const int64_t key_row, value_row;  // rounded up to whole panels
    float* key(int64_t node) { return data_.get() + (SPARE + node) * key_row; }
    float* value(int64_t node) {
        return data_.get() + (nodes_ + 2 * SPARE + 1) * key_row + (SPARE + node) * value_row;
    }
    float* start_key() { return key(nodes_ + SPARE); }
    float* start_value() { return value(nodes_ + SPARE); }
    float* lengths() { return value(nodes_ + SPARE + 1); }

    void clear() { std::fill_n(data_.get(), size_, 0.0f); }
    void add(const Sums& other) {
        for (int64_t i = 0; i < size_; i++) data_[i] += other.data_[i];
    }

    template <class T>
    void write_to(const Gradients& gradients, const Group& group) {
        const Problem& problem = group.problem;
        for (int64_t i = 0; i < nodes_; i++) {
            write(key(i), group.node_of<T>(gradients.key, i), problem.D);
            write(value(i), group.node_of<T>(gradients.value, i), problem.Dv);
        }
        const int64_t head = group.index();
        if (gradients.start_key) {
            std::copy_n(start_key(), problem.D, gradients.start_key + head * problem.D);
            std::copy_n(start_value(), problem.Dv, gradients.start_value + head * problem.Dv);
        }
        if (gradients.lengths) std::copy_n(lengths(), nodes_, gradients.lengths + head * nodes_);
    }

  private:
    // Tiles of AMX reach beyond the nodes, at both ends; what is added there counts for nothing.
    static constexpr int64_t SPARE = HAS_AMX ? PATCH : 0;

    int64_t nodes_, size_;
    Buffer data_;
};

// What a vector of lanes carries from node to node on the way down.
struct Descent {
    Vec reference, scale;  // p = 2^(score - reference) · scale / 4, so that all weights add up to 1
    Vec mean;             // dO·o - dlse
    Node before;
    Vec right, g, c;      // of the node before
    Node start;
    Vec start_g;
    Vec start_weight, start_gradient, end_gradient;
};

struct Row {
    Vec weight, gradient, length_gradient;  // w and dA of node i - 1, and dh of segment i
};

// With few digits the scale isn't used: it is to be in the reference.
template <bool EDGE, bool LENGTHS, Digits DIGITS = Digits::all>
CSA_INLINE Row descend(Descent& at_lane, const Path& path, const Column& at, int32_t i, Vec score, Vec product) {
    Descent& w = at_lane;
    if (LENGTHS) score = minimum(w.reference + CEILING, score);  // in this order a NaN stays
    Node here = node<DIGITS>(score, w.reference);
    if (DIGITS == Digits::all) here.p *= w.scale;
    const Vec g = product - w.mean;
    const Segment s = segment_to<EDGE, LENGTHS, DIGITS>(path, at, i, w.before, here, w.start);
    Vec g_before = w.g, left = s.left;
    const bool joins = EDGE && path.has_start_node;
    if (joins) g_before = s.first ? w.start_g : g_before;
    Vec bend = s.unit.mass;
    if (EDGE || LENGTHS) bend = s.length > 0 ? bend * s.length : Vec{};
    const Vec c = bend * (g - g_before);
    Row row{};
    if (LENGTHS) {
        row.length_gradient = g_before * s.unit.left + g * s.unit.right;
        if (EDGE) row.length_gradient = s.between ? row.length_gradient : Vec{};
    }
    Vec c_before = c;
    if (joins) {
        w.start_weight += s.first ? left : Vec{};
        w.start_gradient += s.first ? left * g_before + c : Vec{};
        left = s.first ? Vec{} : left;
        c_before = s.first ? Vec{} : c;
    }
    if (EDGE) w.end_gradient += s.last ? power(here.p) * g : Vec{};
    row.weight = w.right + left;
    row.gradient = row.weight * w.g + (c_before - w.c);
    // A lane that doesn't see the node before has nothing to give to it, whatever is there.
    if (EDGE) {
        const Int sees = (at.lo < broadcast(i)) & (broadcast(i) <= at.hi);
        row.gradient = sees ? row.gradient : Vec{};
    }
    w.before = here, w.right = s.right, w.g = g, w.c = c;
    return row;
}

template <class T>
class Backward {
  public:
    // What all jobs share: nothing.
    struct Shared {};
    static Shared share(const Problem&) { return {}; }

    Backward(const Problem& problem, const Gradients& gradients, Shared)
        : problem_(problem),
          gradients_(gradients),
          tile_(tile_size(problem)),
          key_row_(whole_panels(problem.D)),
          value_row_(whole_panels(problem.Dv)),
          query_lanes_(buffer(BLOCK * problem.D)),
          out_lanes_(buffer(BLOCK * problem.Dv)),
          query_rows_(buffer(BLOCK * key_row_)),
          out_rows_(buffer(BLOCK * value_row_)),
          query_gradient_(buffer(BLOCK * problem.D)),
          weights_(buffer(BLOCK * (tile_ + 1))),
          score_gradients_(buffer(BLOCK * (tile_ + 1))),
          keys_(buffer((tile_ + 1) * problem.D)),
          values_(buffer((tile_ + 1) * problem.Dv)),
          row_(buffer(std::max(problem.D, problem.Dv))) {}

    void operator()(const Group& group, int64_t first_row, Sums& sums) {
        // A path without length has the value of its last node, and nothing else has a gradient.
        auto without_length = [&](int64_t row) { return gradients_.normalizer[2 * group.flat(row) + 1] == 0; };
        Block block(group, first_row, {0, int32_t(problem_.Lk)}, without_length);
        pack_lanes<T>(block, problem_.query, problem_.D, problem_.scale * LOG2E, query_lanes_.get());
        pack_lanes<T>(block, gradients_.out_gradient, problem_.Dv, 1.0f, out_lanes_.get());
        pack_rows(block, problem_.query, problem_.D, key_row_, problem_.scale, query_rows_.get());
        pack_rows(block, gradients_.out_gradient, problem_.Dv, value_row_, 1.0f, out_rows_.get());
        std::fill_n(query_gradient_.get(), block.panels_in_use * PANEL * problem_.D, 0.0f);
        begin(block, sums);
        for (Run run : block.runs)
            for (int32_t from = run.from; from < run.to; from += tile_)
                tile_of_nodes(block, run, {from, std::min(run.to, from + tile_)}, sums);
        finish(block, sums);
    }

    // After the last block.
    void close(Sums&) {}

  private:
    const Problem& problem_;
    const Gradients& gradients_;
    const int32_t tile_;
    const int64_t key_row_, value_row_;
    Buffer query_lanes_, out_lanes_, query_rows_, out_rows_, query_gradient_, weights_, score_gradients_, keys_,
        values_, row_;
    Descent descents_[PANELS][TILE_VECTORS];

    float* query_of(int p) { return query_lanes_.get() + p * problem_.D * PANEL; }
    float* out_of(int p) { return out_lanes_.get() + p * problem_.Dv * PANEL; }
    float* query_gradient_of(int p) { return query_gradient_.get() + p * problem_.D * PANEL; }

    // A block's rows as they are, [BLOCK][stride], times `factor`; blank lanes are 0.
    void pack_rows(const Block& block, const Tensor4& x, int64_t dim, int64_t stride, float factor, float* packed) {
        for (int lane = 0; lane < block.panels_in_use * PANEL; lane++) {
            float* to = packed + lane * stride;
            std::fill_n(to, stride, 0.0f);
            if (block.blank[lane]) continue;
            read(block.group.row_of<const T>(x, block.first + lane), to, dim);
            for (int64_t d = 0; d < dim; d++) to[d] *= factor;
        }
    }

    void begin(const Block& block, Sums& sums) {
        const Group& group = block.group;
        for (int p = 0; p < block.panels_in_use; p++) {
            alignas(64) float reference[PANEL] = {}, scale[PANEL] = {}, mean[PANEL] = {}, start_score[PANEL] = {},
                              start_g[PANEL] = {};
            for (int i = 0; i < PANEL && p * PANEL + i < block.rows; i++) {
                const int lane = p * PANEL + i;
                const int64_t row = block.first + lane, flat = group.flat(row);
                const T* gradient = group.row_of<const T>(gradients_.out_gradient, row);
                if (block.blank[lane]) {
                    const Run seen = group.sees(row);
                    if (seen.empty()) continue;
                    float* last = sums.value(seen.to - 1);
                    for (int64_t d = 0; d < problem_.Dv; d++) last[d] += to_float(gradient[d]);
                    continue;
                }
                const T* out = group.row_of<const T>(gradients_.out, row);
                const T* rest = gradients_.out_rest
                                    ? static_cast<const T*>(gradients_.out_rest) + flat * problem_.Dv
                                    : nullptr;
                for (int64_t d = 0; d < problem_.Dv; d++)
                    mean[i] += to_float(gradient[d]) * (to_float(out[d]) + (rest ? to_float(rest[d]) : 0.0f));
                if (gradients_.lse_gradient) mean[i] -= gradients_.lse_gradient[flat];
                reference[i] = gradients_.normalizer[2 * flat], scale[i] = 1 / gradients_.normalizer[2 * flat + 1];
            }
            if (problem_.start_key) {
                tile<1, false>(Matrix{group.start_key(), 0}, query_of(p), PANEL, start_score, 0, problem_.D, query_of(p));
                tile<1, false>(Matrix{group.start_value(), 0}, out_of(p), PANEL, start_g, 0, problem_.Dv, out_of(p));
            }
            for (int v = 0; v < TILE_VECTORS; v++) {
                Descent& d = descents_[p][v];
                d = Descent{};
                d.reference = load(reference + v * WIDTH), d.scale = load(scale + v * WIDTH);
                d.mean = load(mean + v * WIDTH);
                d.start = node(load(start_score + v * WIDTH), d.reference);
                d.start.p *= d.scale;
                d.start_g = load(start_g + v * WIDTH) - d.mean;
            }
        }
    }

    void tile_of_nodes(const Block& block, Run run, Run tile, Sums& sums) {
        const Group& group = block.group;
        const Path path(group);
        // Row r belongs to node tile.from + r - 1; where a path begins there is none.
        const Run weighed = {std::max(tile.from - 1, run.from), tile.to};
        const int32_t first_row = weighed.from - tile.from + 1, last_row = tile.to - tile.from;
        const Matrix keys = nodes<T>(group, problem_.key, weighed, problem_.D, keys_.get());
        const Matrix values = nodes<T>(group, problem_.value, weighed, problem_.Dv, values_.get());

        for (int p = 0; p < block.panels_in_use; p++) {
            const Panel& panel = block.panels[p];
            float *weights = weights_.get() + p * PANEL, *gradients = score_gradients_.get() + p * PANEL;
            const Run seen = {std::max(tile.from, panel.hull.from), std::min(tile.to, panel.hull.to)};
            if (seen.empty()) {
                clear(weights, gradients, {first_row, last_row + 1});
                continue;
            }
            const Run in_tile = {seen.from - tile.from, seen.to - tile.from};
            const bool closes = seen.to == std::min(run.to, panel.hull.to);
            const int64_t at = in_tile.from * BLOCK, n = seen.to - seen.from;
            product<false>(n, problem_.D, keys.from_row(seen.from - weighed.from), query_of(p), PANEL, weights + at,
                           BLOCK, soon(keys, tile, p, block.panels_in_use));
            product<false>(n, problem_.Dv, values.from_row(seen.from - weighed.from), out_of(p), PANEL, gradients + at,
                           BLOCK, soon(values, tile, p, block.panels_in_use));
            for (int v = 0; v < TILE_VECTORS; v++) {
                Descent& d = descents_[p][v];
                float *w = weights + v * WIDTH, *g = gradients + v * WIDTH;
                if (path.lengths) descend_run<true>(d, path, panel, v, seen, tile.from, w, g, sums);
                else descend_run<false>(d, path, panel, v, seen, tile.from, w, g, sums);
                if (closes) {
                    const Int ends = load(panel.hi + v * WIDTH) == seen.to;
                    store(w + in_tile.to * BLOCK, d.right);
                    store(g + in_tile.to * BLOCK, ends ? d.right * d.g - d.c : Vec{});
                    d.right = d.c = Vec{};
                }
            }
            clear(weights, gradients, {first_row, in_tile.from});
            clear(weights, gradients, {in_tile.to + closes, last_row + 1});
        }

        const int lanes = block.panels_in_use * PANEL;
        const int64_t n = weighed.to - weighed.from;
        const float *weights = weights_.get() + first_row * BLOCK,
                    *gradients = score_gradients_.get() + first_row * BLOCK;
        for (int64_t d = 0; d < value_row_; d += PANEL)
            product<true>(n, lanes, Matrix{weights, BLOCK}, out_rows_.get() + d, value_row_, sums.value(weighed.from) + d,
                          value_row_, sums.value(tile.to) + d * n);
        for (int64_t d = 0; d < key_row_; d += PANEL)
            product<true>(n, lanes, Matrix{gradients, BLOCK}, query_rows_.get() + d, key_row_, sums.key(weighed.from) + d,
                          key_row_, sums.key(tile.to) + d * n);
        for (int p = 0; p < block.panels_in_use; p++)
            product<true>(problem_.D, n, keys.transposed(), gradients + p * PANEL, BLOCK, query_gradient_of(p), PANEL,
                          query_rows_.get());
    }

    // Zeros for rows in which a panel has nothing.
    static void clear(float* weights, float* gradients, Run rows) {
        for (int32_t r = rows.from; r < rows.to; r++)
            for (int v = 0; v < TILE_VECTORS; v++) {
                store(weights + r * BLOCK + v * WIDTH, Vec{});
                store(gradients + r * BLOCK + v * WIDTH, Vec{});
            }
    }

    template <bool LENGTHS>
    static void descend_run(Descent& descent, const Path& path, const Panel& panel, int v, Run run, int32_t tile_from,
                            float* weights, float* gradients, Sums& sums) {
        const Column at(panel, v);
        Descent d = descent;
        auto one = [&]<bool EDGE>(int32_t i) CSA_LAMBDA {
            const int64_t at_row = (i - tile_from) * BLOCK;
            const Row row =
                descend<EDGE, LENGTHS>(d, path, at, i, load(weights + at_row), load(gradients + at_row));
            store(weights + at_row, row.weight);
            store(gradients + at_row, row.gradient);
            if (LENGTHS) sums.lengths()[i] += sum(row.length_gradient);
        };
        for_each_node(
            run, panel.inner, [&](int32_t i) CSA_LAMBDA { one.template operator()<true>(i); },
            [&](int32_t i) CSA_LAMBDA { one.template operator()<false>(i); });
        descent = d;
    }

    void finish(const Block& block, Sums& sums) {
        const Group& group = block.group;
        const float* start_key = group.start_key();
        for (int lane = 0; lane < block.rows; lane++) {
            const int64_t row = block.first + lane;
            const int p = lane / PANEL, i = lane % PANEL;
            const Descent& descent = descents_[p][i / WIDTH];
            const float start_gradient = descent.start_gradient[i % WIDTH];
            const float* gradient = query_gradient_of(p) + i;
            for (int64_t d = 0; d < problem_.D; d++) {
                float of_scores = gradient[d * PANEL];
                if (start_key) of_scores += start_gradient * start_key[d];
                row_[d] = block.blank[lane] ? 0.0f : of_scores * problem_.scale;
            }
            write(row_.get(), group.row_of<T>(gradients_.query, row), problem_.D);
            if (gradients_.end_lengths)
                gradients_.end_lengths[group.flat(row)] =
                    block.blank[lane] ? 0.0f : descent.end_gradient[i % WIDTH];
        }
        if (!start_key) return;
        alignas(64) float weights[BLOCK], score_gradients[BLOCK];
        for (int lane = 0; lane < block.panels_in_use * PANEL; lane++) {
            const Descent& descent = descents_[lane / PANEL][lane % PANEL / WIDTH];
            weights[lane] = descent.start_weight[lane % WIDTH];
            score_gradients[lane] = descent.start_gradient[lane % WIDTH];
        }
        const int lanes = block.panels_in_use * PANEL;
        for (int64_t d = 0; d < value_row_; d += PANEL)
            tile<1, true>(Matrix{weights, 0}, out_rows_.get() + d, value_row_, sums.start_value() + d, 0, lanes, weights);
        for (int64_t d = 0; d < key_row_; d += PANEL)
            tile<1, true>(Matrix{score_gradients, 0}, query_rows_.get() + d, key_row_, sums.start_key() + d, 0, lanes,
                          weights);
    }
};

}  // namespace continuous_attention

#include "amx_backward.h"

namespace continuous_attention {

// What adds up the gradients of blocks of queries, for each dtype.
template <class T>
using BackwardOf = std::conditional_t<HAS_AMX && std::is_same_v<T, bfloat16>, AmxBackward<bfloat16>, Backward<T>>;

template <class T>
void backward_as(const Problem& problem, const Gradients& gradients) {
    const int64_t groups = problem.B * problem.Hkv;
    const int64_t blocks = (problem.Hq / problem.Hkv * problem.Lq + BLOCK - 1) / BLOCK;
    // With fewer heads than threads, several jobs share a head; each has sums of its own, added in a fixed order.
    const int64_t shares = std::clamp<int64_t>((problem.threads + groups - 1) / std::max<int64_t>(groups, 1), 1,
                                               std::max<int64_t>(blocks, 1));
    const auto shared = BackwardOf<T>::share(problem);
    auto work = [&](BackwardOf<T>& run, int64_t g, int64_t share, Sums& sums) {
        sums.clear();
        for (int64_t b = share; b < blocks; b += shares) run(group_of(problem, g), b * BLOCK, sums);
        run.close(sums);
    };
    if (shares == 1) {
        for_each_job(problem.threads, groups, [&] {
            return [&, run = BackwardOf<T>(problem, gradients, shared), sums = Sums(problem)](int64_t g) mutable {
                work(run, g, 0, sums);
                sums.template write_to<T>(gradients, group_of(problem, g));
            };
        });
        return;
    }
    std::vector<Sums> all;
    for (int64_t i = 0; i < groups * shares; i++) all.emplace_back(problem);
    for_each_job(problem.threads, groups * shares, [&] {
        return [&, run = BackwardOf<T>(problem, gradients, shared)](int64_t job) mutable {
            work(run, job / shares, job % shares, all[job]);
        };
    });
    for_each_job(problem.threads, groups, [&] {
        return [&](int64_t g) {
            for (int64_t share = 1; share < shares; share++) all[g * shares].add(all[g * shares + share]);
            all[g * shares].template write_to<T>(gradients, group_of(problem, g));
        };
    });
}

inline void backward(const Problem& problem, const Gradients& gradients) {
    with_type(problem.dtype, [&](auto t) { backward_as<decltype(t)>(problem, gradients); });
}

}  // namespace continuous_attention
