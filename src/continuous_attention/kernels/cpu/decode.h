// The forward pass for few queries, as when text is generated: bound by reading keys and values, not by arithmetic.
//
// Here the lanes are nodes. A node's neighbour is one place further in memory: loads that start one place earlier or
// later see it.
#pragma once

#include <utility>

#include "path.h"
#include "result.h"

namespace continuous_attention {

constexpr int DECODE_ROWS = 8;     // with more rows, lanes of queries are the better use of the processor
constexpr int DECODE_NODES = 256;  // with fewer nodes nothing is gained
constexpr int DECODE_TILE = 96;    // nodes; a multiple of every vector's width
static_assert(DECODE_TILE % WIDTH == 0);

template <size_t... I>
CSA_INLINE Vec sums_of_pairs(Vec a, Vec b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// The sum of each of WIDTH vectors, in order.
CSA_INLINE Vec sums_of(Vec (&x)[WIDTH]) {
#pragma GCC unroll 5
    for (int n = WIDTH; n > 1; n /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < n / 2; i++)
            x[i] = sums_of_pairs(x[2 * i], x[2 * i + 1], std::make_index_sequence<WIDTH>());
    return x[0];
}

// q·k for one row of keys, spread over the lanes; q is padded with zeros to whole vectors.
template <class T>
CSA_INLINE Vec dot(const float* q, const T* k, int64_t dim) {
    Vec even{}, odd{};
    int64_t d = 0;
    for (; d + 2 * WIDTH <= dim; d += 2 * WIDTH) {
        even += load(q + d) * load(k + d);
        odd += load(q + d + WIDTH) * load(k + d + WIDTH);
    }
    for (; d + WIDTH <= dim; d += WIDTH) even += load(q + d) * load(k + d);
    if (d < dim) {
        T rest[WIDTH] = {};
        std::copy_n(k + d, dim - d, rest);
        odd += load(q + d) * load(rest);
    }
    return even + odd;
}

// Fetches a row that will be read soon.
template <class T>
CSA_INLINE void fetch(const T* row, int64_t dim) {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t d = 0; d < dim; d += LINE) __builtin_prefetch(row + d);
}

// The scores of n nodes for several queries; each row of keys is read once. Meanwhile `soon` is fetched, n rows too.
template <class T>
void scores_of(const float* q, int64_t q_row, int rows, const T* keys, int64_t key_row, int64_t dim, int32_t n,
               float* scores, int64_t scores_row, const T* soon, int64_t soon_row, int64_t soon_dim) {
    for (int32_t i = 0; i < n; i += WIDTH) {
        for (int32_t j = i; j < std::min(i + WIDTH, n); j++) fetch(soon + j * soon_row, soon_dim);
        for (int r = 0; r < rows; r++) {
            Vec parts[WIDTH];
#pragma GCC unroll 16
            for (int j = 0; j < WIDTH; j++)
                parts[j] = dot(q + r * q_row, keys + std::min(i + j, n - 1) * key_row, dim);
            store(scores + r * scores_row + i, sums_of(parts));
        }
    }
}

inline float highest_of(const float* x, int32_t n, float highest) {
    Vec best = broadcast(highest);
    int32_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) best = maximum(best, load(x + i));
    for (int lane = 0; lane < WIDTH; lane++) highest = std::max(highest, best[lane]);
    for (; i < n; i++) highest = std::max(highest, x[i]);
    return highest;
}

template <class T>
class Decode {
  public:
    explicit Decode(const Problem& problem)
        : problem_(problem),
          query_row_((problem.D + WIDTH - 1) / WIDTH * WIDTH),
          sums_row_(whole_panels(problem.Dv)),
          query_(buffer(DECODE_ROWS * query_row_)),
          sums_(buffer(DECODE_ROWS * sums_row_)),
          weights_(buffer(DECODE_ROWS * WEIGHTS_ROW)),
          values_(buffer((DECODE_TILE + 1) * sums_row_)) {}

    // Gives put(row, integrals) for every row of the group; the first one is row 0.
    template <class Put>
    void operator()(const Group& group, int64_t, Run piece, const Put& put) {
        const int rows = int(group.rows());
        Run all = {INT32_MAX, 0};
        for (int r = 0; r < rows; r++) {
            begin(group, r, piece);
            if (walks_[r].seen.empty()) continue;
            all = {std::min(all.from, walks_[r].seen.from), std::max(all.to, walks_[r].seen.to)};
        }
        for (int32_t from = all.from; from < all.to; from += DECODE_TILE)
            tile_of_nodes(group, {from, std::min(all.to, from + DECODE_TILE)}, rows);
        for (int r = 0; r < rows; r++) finish(group, r, piece, put);
    }

  private:
    // One row's path.
    struct Walk {
        Run seen;
        bool starts;  // this piece has the beginning
        float end_length;
        float start_score, start_weight;
        float reference, total;
        float score, p, right;  // of the node before
    };
    // Rows of weights begin one place late, so that there is a node before the first; and end one vector late.
    static constexpr int64_t PAD = WIDTH, WEIGHTS_ROW = PAD + DECODE_TILE + 2 * WIDTH;

    const Problem& problem_;
    const int64_t query_row_, sums_row_;
    Buffer query_, sums_, weights_, values_;
    Walk walks_[DECODE_ROWS];

    float* query_of(int r) { return query_.get() + r * query_row_; }
    float* sums_of_row(int r) { return sums_.get() + r * sums_row_; }
    float* weights_of(int r) { return weights_.get() + r * WEIGHTS_ROW + PAD; }

    void begin(const Group& group, int r, Run piece) {
        Walk& w = walks_[r];
        w = Walk{};
        std::fill_n(sums_of_row(r), sums_row_, 0.0f);
        std::fill_n(query_of(r), query_row_, 0.0f);
        w.reference = -1e30f;
        const Part part = group.part_of(r, piece);
        if (part.seen.empty()) return;
        w.seen = part.seen, w.starts = part.starts;
        w.end_length = part.ends ? group.end_length(r) : 0;
        read(group.row_of<const T>(problem_.query, r), query_of(r), problem_.D);
        for (int64_t d = 0; d < problem_.D; d++) query_of(r)[d] *= problem_.scale * LOG2E;
        if (w.starts && problem_.start_key) {
            w.start_score = sum(dot(query_of(r), group.start_key(), problem_.D));
            w.reference = w.start_score;
        }
    }

    void tile_of_nodes(const Group& group, Run tile, int rows) {
        const int32_t n = tile.to - tile.from;
        if (!any_sees(tile, rows)) return;
        scores_of(query_.get(), query_row_, rows, group.node_of<const T>(problem_.key, tile.from), problem_.key.row,
                  problem_.D, n, weights_of(0), WEIGHTS_ROW, group.node_of<const T>(problem_.value, tile.from),
                  problem_.value.row, problem_.Dv);
        for (int r = 0; r < rows; r++) weigh(group, r, tile);
        // Weights belong to the nodes one before.
        const Run weighed = {tile.from - 1 + !any_sees({tile.from - 1, tile.from}, rows), tile.to};
        const Matrix values = values_of(group, weighed, rows);
        const Matrix weights = {weights_of(0) + weighed.from - (tile.from - 1), WEIGHTS_ROW};
        for (int64_t d = 0; d < sums_row_; d += PANEL)
            product<true>(rows, weighed.to - weighed.from, weights, values.data + d, values.stride, sums_.get() + d,
                          sums_row_, values.data);
    }

    // Rows of values, as whole panels; those that no row sees may hold anything and become 0.
    Matrix values_of(const Group& group, Run run, int rows) {
        bool in_place = std::is_same_v<T, float> && problem_.Dv == sums_row_;
        for (int32_t i = run.from; i < run.to; i++) in_place = in_place && any_sees({i, i + 1}, rows);
        if constexpr (std::is_same_v<T, float>)
            if (in_place) return {group.node_of<const T>(problem_.value, run.from), problem_.value.row};
        for (int32_t i = run.from; i < run.to; i++) {
            float* row = values_.get() + (i - run.from) * sums_row_;
            const bool seen = any_sees({i, i + 1}, rows);
            if (seen) read(group.node_of<const T>(problem_.value, i), row, problem_.Dv);
            std::fill(row + (seen ? problem_.Dv : 0), row + sums_row_, 0.0f);
        }
        return {values_.get(), sums_row_};
    }

    bool any_sees(Run nodes, int rows) const {
        for (int r = 0; r < rows; r++)
            if (walks_[r].seen.from < nodes.to && nodes.from < walks_[r].seen.to) return true;
        return false;
    }

    // Turns a row of scores into weights, in place: place i has the weight of node tile.from + i - 1, up to the place
    // after the tile. Places of nodes that the row doesn't see are 0.
    void weigh(const Group& group, int r, Run tile) {
        Walk& w = walks_[r];
        float* const row = weights_of(r);
        const Run seen = {std::max(tile.from, w.seen.from), std::min(tile.to, w.seen.to)};
        const int32_t tile_size = tile.to - tile.from;
        if (seen.empty()) {
            std::fill_n(row, tile_size + 1, 0.0f);
            return;
        }
        const int32_t n = seen.to - seen.from;
        float* const score = row + (seen.from - tile.from);
        const bool opens = seen.from == w.seen.from, closes = seen.to == w.seen.to;

        alignas(64) float length[DECODE_TILE + 2 * WIDTH], p_room[PAD + DECODE_TILE + WIDTH],
            right_room[PAD + DECODE_TILE + WIDTH];
        float *p = p_room + PAD, *right = right_room + PAD;
        const bool joins = opens && w.starts && problem_.start_key;
        const bool held = opens && w.starts && !problem_.start_key && problem_.start_length > 0;
        const float* const lengths = group.lengths();
        if (lengths) std::copy_n(lengths + seen.from, n, length);
        else std::fill_n(length, n, 1.0f);
        if (opens) length[0] = joins ? problem_.start_length : 0;
        std::fill_n(length + n, 2 * WIDTH, 0.0f);

        raise_reference(w, r, score, length, n, held, lengths && !closes ? lengths[seen.to] : 0);
        if (lengths)
            for (int32_t i = 0; i < n; i++) score[i] = std::min(score[i], w.reference + CEILING);
        std::fill_n(score + n, WIDTH, score[n - 1]);
        for (int32_t i = 0; i < n; i += WIDTH) store(p + i, quarter_exp2(load(score + i) - w.reference));
        score[-1] = joins ? w.start_score : opens ? score[0] : w.score;
        p[-1] = joins ? quarter_exp2(broadcast(w.start_score - w.reference))[0] : opens ? p[0] : w.p;
        right[-1] = w.right;
        w.score = score[n - 1], w.p = p[n - 1];

        Vec total{};
        alignas(64) float left[DECODE_TILE + 2 * WIDTH];
        for (int32_t i = 0; i < n; i += WIDTH) {
            Vec rise = load(score + i) - load(score + i - 1), h = load(length + i);
            Shares share = shares(rise, load(p + i - 1), load(p + i));
            store(left + i, h * share.left);
            store(right + i, h * share.right);
            total += h * (share.left + share.right);
        }
        w.total += sum(total);
        if (joins) w.start_weight += left[0], left[0] = 0;
        if (held) hold(w, right[0], power(p[0]) * problem_.start_length);
        if (closes) hold(w, right[n - 1], power(p[n - 1]) * w.end_length);
        for (int32_t i = 0; i < n; i += WIDTH) store(score + i, load(right + i - 1) + load(left + i));

        w.right = closes ? 0 : right[n - 1];
        std::fill(row, score, 0.0f);
        if (opens) score[0] = 0;
        score[n] = closes ? right[n - 1] : 0;
        if (seen.to < tile.to) std::fill(score + n + 1, row + tile_size + 1, 0.0f);
    }

    static void hold(Walk& w, float& right, float mass) {
        right += mass;
        w.total += mass;
    }

    // `next_length` is that of the segment after the tile.
    void raise_reference(Walk& w, int r, const float* score, const float* length, int32_t n, bool held,
                         float next_length) {
        float highest = w.reference;
        if (!problem_.lengths.data) {
            highest = highest_of(score, n, highest);
        } else {
            for (int32_t i = 0; i < n; i++) {
                // A node with no length on either side, and nothing held on it, has no weight.
                const bool has_length = length[i] > 0 || (i + 1 < n ? length[i + 1] : next_length) > 0 ||
                                        (i == 0 && held) || (i == n - 1 && w.end_length > 0);
                if (has_length && !(score[i] <= highest)) highest = score[i];
            }
        }
        if (highest <= w.reference + SLACK) return;
        const float factor = std::exp2(w.reference - highest);
        w.reference = highest;
        w.p *= factor, w.right *= factor, w.total *= factor, w.start_weight *= factor;
        for (int64_t d = 0; d < problem_.Dv; d++) sums_of_row(r)[d] *= factor;
    }

    template <class Put>
    void finish(const Group& group, int r, Run piece, const Put& put) {
        const Walk& w = walks_[r];
        float* sums = sums_of_row(r);
        if (w.total == 0) {
            last_value<T>(group, r, piece, sums);
        } else if (const float* start_value = group.start_value()) {
            for (int64_t d = 0; d < problem_.Dv; d++) sums[d] += w.start_weight * start_value[d];
        }
        put(r, Integrals{w.reference, w.total, sums});
    }
};

}  // namespace continuous_attention
