// The kernels without Python, for sanitizers, emulators and other compilers (sanitize.sh): random problems, forward and
// backward, against the formulas of docs/math.md in double precision, one query at a time.
//
// Every tensor has memory of its own and no byte more, strides are random, and what must not be read holds NaN: unseen
// nodes, gaps between rows, and everything that is to be written.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "backward.h"
#include "forward.h"
#include "processor.h"

using namespace continuous_attention;

namespace {

constexpr float NONE = std::numeric_limits<float>::quiet_NaN();
std::mt19937 generator;

int64_t whole(int64_t from, int64_t to) { return std::uniform_int_distribution<int64_t>(from, to)(generator); }
float normal() { return std::normal_distribution<float>()(generator); }
bool chance(double p) { return std::bernoulli_distribution(p)(generator); }
template <class X>
X one_of(std::initializer_list<X> of) {
    return of.begin()[whole(0, int64_t(of.size()) - 1)];
}

// (B, heads, rows, dim) in any order of dims and with gaps; expanded where a stride is 0.
template <class T>
struct Array {
    int64_t B, heads, rows, dim;
    Tensor4 strides{};
    std::vector<T> data;

    Array(int64_t B, int64_t heads, int64_t rows, int64_t dim, bool contiguous) : B(B), heads(heads), rows(rows), dim(dim) {
        int64_t sizes[3] = {B, heads, rows}, step[3], order[3] = {2, 1, 0}, extent = dim;
        if (!contiguous) std::shuffle(order, order + 3, generator), extent += whole(0, 3);
        for (int64_t d : order) {
            const bool expanded = !contiguous && chance(0.1);
            step[d] = expanded ? 0 : extent;
            if (!expanded) extent *= std::max<int64_t>(sizes[d], 1);
        }
        if (B * heads * rows > 0) data.resize((B - 1) * step[0] + (heads - 1) * step[1] + (rows - 1) * step[2] + dim);
        for (T& x : data) from_float(&x, NONE);
        strides = {data.data(), step[0], step[1], step[2]};
    }
    T& at(int64_t b, int64_t h, int64_t i, int64_t d) {
        return data[b * strides.batch + h * strides.head + i * strides.row + d];
    }
    double number(int64_t b, int64_t h, int64_t i, int64_t d) { return to_float(at(b, h, i, d)); }
    template <class F>
    void fill(const F& f) {
        for (int64_t b = 0; b < B; b++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t i = 0; i < rows; i++)
                    for (int64_t d = 0; d < dim; d++) from_float(&at(b, h, i, d), f(b, i));
    }
};

// L, R and M of a segment of length 1, by quotients or by series.
struct Moments {
    double left, right, bend;
};
Moments moments(double a0, double a1) {
    const double d = a1 - a0, p0 = std::exp(a0), p1 = std::exp(a1);
    if (std::abs(d) > 0.5) {
        const double whole = (p1 - p0) / d, left = (whole - p0) / d, right = (p1 - whole) / d;
        return {left, right, (right - left) / d};
    }
    Moments m{};
    double power = 1;  // d^n / n!
    for (int n = 0; n < 20; power *= d / ++n) {
        m.left += power / ((n + 1) * (n + 2));
        m.right += power / (n + 2);
        m.bend += power / ((n + 2) * (n + 3));
    }
    return {p0 * m.left, p0 * m.right, p0 * m.bend};
}

// The largest relative errors of one segment's T, L and R, and M, in units of float32's rounding error 2^-24.
struct SegmentErrors {
    double total, share, mass;
};
SegmentErrors segment_errors(int count) {
    SegmentErrors worst{};
    std::uniform_real_distribution<float> scores(-6, 6);
    for (int i = 0; i < count; i++) {
        // Any rise, a small one, and steep ones.
        const float a = scores(generator), b = scores(generator);
        const float first = i % 4 == 2 ? -100 * b * b : a, second = i % 4 == 1 ? a + b / 4 : i % 4 == 3 ? -1e4f * b * b : b;
        const Vec p0 = quarter_exp2(broadcast(first)), p1 = quarter_exp2(broadcast(second));
        const Shares found = shares(broadcast(second) - broadcast(first), p0, p1);
        const Moments m = moments(first * std::log(2.0), second * std::log(2.0));
        const double total = m.left + m.right, left = found.left[0], right = found.right[0];
        auto raise = [](double& to, double actual, double exact) { to = std::max(to, std::abs(actual / exact - 1) / 0x1p-24); };
        raise(worst.total, left + right, total);
        raise(worst.share, left, m.left);
        raise(worst.share, right, m.right);
        raise(worst.mass, found.mass[0], m.bend);
    }
    return worst;
}

struct Worst {
    double smallest;   // what rounding to a denormal number, or an exponential kept from being one, costs
    double error = 0;  // the largest one so far, in budgets
    // `budget` is the error that the dtype allows for a number of size 1.
    void compare(double actual, double expected, double size, double budget, const char* what, int seed) {
        const double error = std::abs(actual - expected) / (budget * (size + std::abs(expected)) + smallest);
        if (actual == expected) return;
        if (!(error <= 1)) {
            std::printf("seed %d: %s is %.9g, not %.9g (%.3g times its budget)\n", seed, what, actual, expected, error);
            std::exit(1);
        }
        this->error = std::max(this->error, error);
    }
};

template <class T>
double check(DType dtype, int seed) {
    generator.seed(seed);
    const int64_t G = one_of({1, 1, 2, 3, 4, 8}), Hkv = whole(1, 2), B = whole(1, 2);
    const int64_t Lq = chance(0.3) ? whole(1, 130) : whole(0, 20);
    const bool in_pieces = Lq > 0 && Lq < 20 && chance(0.2);  // where heads are fewer than threads
    const int64_t Lk = in_pieces ? whole(512, 1200) : chance(0.3) ? whole(1, 200) : whole(0, 30);
    auto head_dim = [] { return chance(0.7) ? whole(1, 40) : one_of<int64_t>({48, 64, 65, 96, 128, 200, 255, 256}); };
    const int64_t D = head_dim(), Dv = chance(0.5) ? D : head_dim(), Hq = Hkv * G;
    Array<T> query(B, Hq, Lq, D, false), key(B, Hkv, Lk, D, false), value(B, Hkv, Lk, Dv, false);
    Array<T> out(B, Hq, Lq, Dv, true), out_gradient(B, Hq, Lq, Dv, false), rest(B, Hq, Lq, Dv, true);
    std::vector<float> lse(B * Hq * Lq, NONE), lse_gradient(B * Hq * Lq), normalizer(2 * lse.size(), NONE);
    for (float& x : lse_gradient) x = normal();

    const int64_t shared = one_of<int64_t>({1, B}), kind = whole(0, 3);
    std::vector<int32_t> intervals(shared * Lq * 2);
    std::vector<bool> seen(B * Lk), used(B * Lq);
    for (int64_t i = 0; i < shared * Lq; i++) {
        int64_t lo = whole(0, Lk), hi = whole(0, Lk);
        if (kind == 0) lo = 0, hi = std::clamp<int64_t>(Lk - Lq + i % Lq + 1, 0, Lk);  // causal
        if (kind == 1) lo = 0, hi = Lk;
        if (kind == 2) hi = std::min<int64_t>(lo + whole(0, 3), Lk);
        intervals[2 * i] = int32_t(lo), intervals[2 * i + 1] = int32_t(hi);
    }
    auto sees = [&](int64_t b, int64_t j) { return &intervals[((shared > 1 ? b : 0) * Lq + j) * 2]; };
    for (int64_t b = 0; b < B; b++)
        for (int64_t j = 0; j < Lq; j++) {
            for (int32_t i = sees(b, j)[0]; i < sees(b, j)[1]; i++)
                for (int64_t c = 0; c < B; c++)  // an expanded batch shares its memory
                    if (c == b || key.strides.batch == 0 || value.strides.batch == 0) seen[c * Lk + i] = true;
            if (sees(b, j)[0] < sees(b, j)[1])
                for (int64_t c = 0; c < B; c++) used[c * Lq + j] = true;
        }
    const bool one_node = key.strides.row == 0 || value.strides.row == 0, one_query = query.strides.row == 0;
    query.fill([&](int64_t b, int64_t j) { return used[b * Lq + j] || one_query ? normal() : NONE; });
    key.fill([&](int64_t b, int64_t i) { return seen[b * Lk + i] || one_node ? normal() : NONE; });
    value.fill([&](int64_t b, int64_t i) { return seen[b * Lk + i] || one_node ? normal() : NONE; });
    out_gradient.fill([&](int64_t, int64_t) { return normal(); });

    const int64_t lengths_shared = one_of<int64_t>({1, B}), ends_shared = one_of<int64_t>({1, B});
    std::vector<float> lengths(chance(0.5) ? lengths_shared * Lk : 0), ends(chance(0.3) ? ends_shared * Lq : 0);
    for (float& x : lengths) x = chance(0.2) ? 0.0f : std::abs(normal());
    for (float& x : ends) x = chance(0.3) ? 0.0f : std::abs(normal());
    const bool has_start = chance(0.5);
    std::vector<float> start_key(has_start * Hkv * D), start_value(has_start * Hkv * Dv);
    for (float& x : start_key) x = normal();
    for (float& x : start_value) x = normal();
    auto address = [](auto& x) { return x.empty() ? nullptr : x.data(); };
    const float scale = (chance(0.2) ? 8.0f : 1.0f) / std::sqrt(float(D));
    const Problem problem{
        .dtype = dtype, .B = B, .Hq = Hq, .Hkv = Hkv, .Lq = Lq, .Lk = Lk, .D = D, .Dv = Dv, .scale = scale,
        .query = query.strides, .key = key.strides, .value = value.strides,
        .intervals = {intervals.data(), shared > 1 ? 2 * Lq : 0},
        .lengths = {address(lengths), lengths_shared > 1 ? Lk : 0},
        .start_key = address(start_key), .start_value = address(start_value),
        .start_length = has_start ? 0.75f : one_of({0.0f, 0.5f}), .end_length = one_of({0.0f, 0.5f}),
        .end_lengths = {address(ends), ends_shared > 1 ? Lq : 0}, .threads = int32_t(whole(1, 4))};
    const bool keep_rest = dtype != DType::float32;
    forward(problem, {.out = out.strides, .lse = lse.data(), .out_rest = keep_rest ? rest.data.data() : nullptr,
                      .normalizer = normalizer.data()});

    Array<T> d_query(B, Hq, Lq, D, true), d_key(B, Hkv, Lk, D, true), d_value(B, Hkv, Lk, Dv, true);
    std::vector<float> d_start_key(B * start_key.size(), NONE), d_start_value(B * start_value.size(), NONE);
    std::vector<float> d_lengths(lengths.empty() ? 0 : B * Hkv * Lk, NONE), d_ends(ends.empty() ? 0 : lse.size(), NONE);
    const bool with_lse = chance(0.7);
    backward(problem, {.out = out.strides, .out_gradient = out_gradient.strides,
                       .out_rest = keep_rest ? rest.data.data() : nullptr, .normalizer = normalizer.data(),
                       .lse_gradient = with_lse ? lse_gradient.data() : nullptr, .query = d_query.strides,
                       .key = d_key.strides, .value = d_value.strides, .start_key = address(d_start_key),
                       .start_value = address(d_start_value), .lengths = address(d_lengths),
                       .end_lengths = address(d_ends)});

    // A score is off by some units of float32 times its size, and everything else by that, times what it is a sum of;
    // what is stored in half precision is rounded once more.
    const double unit = 1.2e-7 * (16 + 8 * scale * D);
    const double rounding = dtype == DType::float32 ? 0 : dtype == DType::bfloat16 ? 0x1p-8 : 0x1p-11;
    // What is summed up in float32 carries the rounding of out in two halves; on AMX that of the weights, too.
    const bool on_amx = HAS_AMX && dtype == DType::bfloat16;
    const double twice = on_amx ? rounding : rounding * rounding;
    Worst worst{.smallest = dtype == DType::float16 ? 0x1p-25 : 1e-34};
    for (int64_t b = 0; b < B; b++)
        for (int64_t g = 0; g < Hkv; g++) {
            // Gradients of this head's keys, values, lengths and start, and the sizes of what they are sums of.
            std::vector<double> dk(Lk * D), dv(Lk * Dv), dh(Lk), dk0(D), dv0(Dv), k_size(Lk), v_size(Lk), h_size(Lk);
            double k0_size = 0, v0_size = 0;
            for (int64_t h = g * G; h < (g + 1) * G; h++)
                for (int64_t j = 0; j < Lq; j++) {
                    const int64_t lo = sees(b, j)[0], hi = sees(b, j)[1], n = hi - lo, flat = (b * Hq + h) * Lq + j;
                    std::vector<double> o(Dv), dq(D);
                    double log_sum = -INFINITY, d_end = 0, o_size = 0, q_size = 0, end_size = 0;
                    auto dO = [&](int64_t d) { return out_gradient.number(b, h, j, d); };
                    if (n > 0) {
                        // Node 0 is the start node.
                        std::vector<double> a(n + 1), length(n + 1), held(n + 1), weight(n + 1), gain(n + 1), extent(n + 2);
                        auto k = [&](int64_t i, int64_t d) {
                            return i ? key.number(b, g, lo + i - 1, d) : has_start ? start_key[g * D + d] : 0.0f;
                        };
                        auto v = [&](int64_t i, int64_t d) {
                            return i ? value.number(b, g, lo + i - 1, d) : has_start ? start_value[g * Dv + d] : 0.0f;
                        };
                        for (int64_t i = !has_start; i <= n; i++) {
                            for (int64_t d = 0; d < D; d++) a[i] += scale * query.number(b, h, j, d) * k(i, d);
                            const float* own = problem.lengths.data + b * problem.lengths.batch;
                            if (i) length[i] = i == 1 ? (has_start ? 0.75 : 0) : lengths.empty() ? 1 : own[lo + i - 1];
                        }
                        if (!has_start) held[1] = problem.start_length;
                        held[n] += ends.empty() ? problem.end_length : problem.end_lengths.data[b * problem.end_lengths.batch + j];
                        double peak = -INFINITY, total = 0;
                        for (int64_t i = 0; i <= n; i++)
                            if (length[i] + (i < n ? length[i + 1] : 0) + held[i] > 0) peak = std::max(peak, a[i]);
                        std::vector<Moments> m(n + 1);
                        for (int64_t i = 1; i <= n; i++) {
                            m[i] = moments(a[i - 1] - peak, a[i] - peak);
                            if (length[i] > 0) weight[i - 1] += length[i] * m[i].left, weight[i] += length[i] * m[i].right;
                        }
                        for (int64_t i = 0; i <= n; i++)
                            if (held[i] > 0) weight[i] += held[i] * std::exp(a[i] - peak);
                        for (double w : weight) total += w;
                        double largest = 0, dO_size = 0;
                        for (int64_t i = 0; i <= n; i++)
                            for (int64_t d = 0; d < Dv; d++) {
                                largest = std::max(largest, std::abs(v(i, d)));
                                if (total > 0) o[d] += weight[i] / total * v(i, d);
                                else if (i == n) o[d] = v(i, d);
                            }
                        for (int64_t d = 0; d < Dv; d++) dO_size += std::abs(dO(d));
                        o_size = largest;
                        if (total == 0) {
                            for (int64_t d = 0; d < Dv; d++) dv[(hi - 1) * Dv + d] += dO(d);
                            v_size[hi - 1] += dO_size;
                        } else {
                            log_sum = peak + std::log(total);
                            double size = dO_size * 2 * largest + 1;
                            for (int64_t i = 0; i <= n; i++) {
                                gain[i] = with_lse ? lse_gradient[flat] : 0;
                                for (int64_t d = 0; d < Dv; d++) gain[i] += dO(d) * (v(i, d) - o[d]);
                            }
                            std::vector<double> da(n + 1);
                            for (int64_t i = 0; i <= n; i++) {
                                da[i] += weight[i] * gain[i];
                                if (!i || length[i] == 0) continue;
                                const double bend = length[i] * m[i].bend * (gain[i - 1] - gain[i]);
                                da[i] += bend, da[i - 1] -= bend;
                            }
                            for (int64_t i = 0; i <= n; i++) {
                                double k_largest = 0, q_largest = 0;
                                const double share = da[i] / total * scale;
                                for (int64_t d = 0; d < D; d++) {
                                    const double q = query.number(b, h, j, d);
                                    k_largest = std::max(k_largest, std::abs(k(i, d)));
                                    q_largest = std::max(q_largest, std::abs(q));
                                    dq[d] += share * k(i, d);
                                    (i ? dk[(lo + i - 1) * D + d] : dk0[d]) += share * q;
                                }
                                for (int64_t d = 0; d < Dv; d++)
                                    (i ? dv[(lo + i - 1) * Dv + d] : dv0[d]) += weight[i] / total * dO(d);
                                const double share_size = weight[i] / total * size * scale;
                                q_size += share_size * k_largest;
                                (i ? k_size[lo + i - 1] : k0_size) += share_size * q_largest;
                                (i ? v_size[lo + i - 1] : v0_size) += weight[i] / total * dO_size;
                                if (i > 1) {
                                    dh[lo + i - 1] += (gain[i - 1] * m[i].left + gain[i] * m[i].right) / total;
                                    h_size[lo + i - 1] += (m[i].left + m[i].right) / total * size;
                                }
                            }
                            d_end = std::exp(a[n] - peak) * gain[n] / total;
                            end_size = std::exp(a[n] - peak) / total * size;
                        }
                    }
                    auto of_row = [&](double x, double y, double size, const char* what, double more = 0) {
                        worst.compare(x, y, size, unit + more, what, seed);
                    };
                    of_row(lse[flat], log_sum, 1, "lse");
                    for (int64_t d = 0; d < Dv; d++) of_row(out.number(b, h, j, d), o[d], o_size, "out", rounding);
                    for (int64_t d = 0; d < D; d++)
                        of_row(d_query.number(b, h, j, d), dq[d], q_size, "the query's gradient", rounding);
                    if (!ends.empty()) of_row(d_ends[flat], d_end, end_size, "an end length's gradient", twice);
                }
            auto of_head = [&](double x, double y, double size, const char* what, double more) {
                worst.compare(x, y, size, unit + more, what, seed);
            };
            const int64_t head = b * Hkv + g;
            for (int64_t i = 0; i < Lk; i++) {
                for (int64_t d = 0; d < D; d++)
                    of_head(d_key.number(b, g, i, d), dk[i * D + d], k_size[i], "a key's gradient", rounding);
                for (int64_t d = 0; d < Dv; d++)
                    of_head(d_value.number(b, g, i, d), dv[i * Dv + d], v_size[i], "a value's gradient", rounding);
                if (!lengths.empty())
                    of_head(d_lengths[head * Lk + i], dh[i], h_size[i], "a length's gradient", twice);
            }
            for (int64_t d = 0; d < D && has_start; d++)
                of_head(d_start_key[head * D + d], dk0[d], k0_size, "the start key's gradient", twice);
            for (int64_t d = 0; d < Dv && has_start; d++)
                of_head(d_start_value[head * Dv + d], dv0[d], v0_size, "the start value's gradient",
                            on_amx ? rounding : 0);
        }
    return worst.error;
}

}  // namespace

int main(int argc, char** argv) {
    const int count = argc > 1 ? std::atoi(argv[1]) : 300, first = argc > 2 ? std::atoi(argv[2]) : 0;
    const SegmentErrors segment = segment_errors(100'000);
    if (!(segment.total < 8 && segment.share < 16 && segment.mass < 32)) {
        std::printf("a segment is off by %.1f of T, %.1f of a share, %.1f of M, in rounding errors\n", segment.total,
                    segment.share, segment.mass);
        return 1;
    }
    double worst = 0;
    for (int seed = first; seed < first + count; seed++) {
        const auto dtype = DType(seed % 3);
        with_type(dtype, [&](auto t) { worst = std::max(worst, check<decltype(t)>(dtype, seed)); });
    }
    std::printf("%d problems, vectors of %d: at most %.2f of the budget; segments: T %.1f, L and R %.1f, M %.1f rounding "
                "errors; this processor could run %s\n",
                count, WIDTH, worst, segment.total, segment.share, segment.mass, runnable().front().c_str());
}
