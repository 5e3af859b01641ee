// The Python module of one variant: tensors arrive as addresses and strides, so no version of torch is compiled in.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <tuple>

#include "backward.h"
#include "forward.h"
#include "processor.h"
#include "problem.h"

namespace nb = nanobind;

namespace {

using namespace continuous_attention;

using Address = std::uintptr_t;                       // 0: there is no such tensor
using Sizes = std::array<int64_t, 4>;                 // a shape, or strides
using Strided = std::tuple<Address, Sizes>;           // (B, heads, rows, dim), the last stride is 1
using Vector = std::tuple<Address, int64_t>;          // (B or 1, n) contiguous, and B or 1
using Start = std::tuple<Address, Address, double>;   // key, value, length
using End = std::tuple<double, Vector>;               // one length, or one per query

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

Tensor4 tensor(const Strided& x) {
    const auto& [address, strides] = x;
    return {pointer<void>(address), strides[0], strides[1], strides[2]};
}

Tensor4 contiguous(Address address, int64_t heads, int64_t rows, int64_t dim) {
    return {pointer<void>(address), heads * rows * dim, rows * dim, dim};
}

template <class T>
PerBatch<T> per_batch(const Vector& x, int64_t n) {
    const auto [address, batch] = x;
    return {pointer<T>(address), batch > 1 ? n : 0};
}

// What both directions need, in the order of ops.py's _problem.
using Arguments = std::tuple<int, Sizes, Sizes, Sizes, double, Strided, Strided, Strided, Vector, Vector, Start, End, int>;

Problem problem(const Arguments& arguments) {
    const auto& [dtype, q, k, v, scale, query, key, value, intervals, lengths, start, end, threads] = arguments;
    return {
        .dtype = static_cast<DType>(dtype),
        .B = q[0],
        .Hq = q[1],
        .Hkv = k[1],
        .Lq = q[2],
        .Lk = k[2],
        .D = q[3],
        .Dv = v[3],
        .scale = static_cast<float>(scale),
        .query = tensor(query),
        .key = tensor(key),
        .value = tensor(value),
        .intervals = per_batch<const int32_t>(intervals, 2 * q[2]),
        .lengths = per_batch<const float>(lengths, k[2]),
        .start_key = pointer<const float>(std::get<0>(start)),
        .start_value = pointer<const float>(std::get<1>(start)),
        .start_length = static_cast<float>(std::get<2>(start)),
        .end_length = static_cast<float>(std::get<0>(end)),
        .end_lengths = per_batch<const float>(std::get<1>(end), q[2]),
        .threads = threads,
    };
}

void run_forward(const Arguments& arguments, Address out, Address lse, Address out_rest, Address normalizer) {
    const Problem p = problem(arguments);
    const Result result{
        .out = contiguous(out, p.Hq, p.Lq, p.Dv),
        .lse = pointer<float>(lse),
        .out_rest = pointer<void>(out_rest),
        .normalizer = pointer<float>(normalizer),
    };
    nb::gil_scoped_release release;
    forward(p, result);
}

// The gradients of query, key, value, start key and value, lengths and end lengths are contiguous.
void run_backward(const Arguments& arguments, const Strided& out, const Strided& out_gradient, Address out_rest,
                  Address normalizer, Address lse_gradient, const std::array<Address, 7>& gradients) {
    const Problem p = problem(arguments);
    const Gradients result{
        .out = tensor(out),
        .out_gradient = tensor(out_gradient),
        .out_rest = pointer<const void>(out_rest),
        .normalizer = pointer<const float>(normalizer),
        .lse_gradient = pointer<const float>(lse_gradient),
        .query = contiguous(gradients[0], p.Hq, p.Lq, p.D),
        .key = contiguous(gradients[1], p.Hkv, p.Lk, p.D),
        .value = contiguous(gradients[2], p.Hkv, p.Lk, p.Dv),
        .start_key = pointer<float>(gradients[3]),
        .start_value = pointer<float>(gradients[4]),
        .lengths = pointer<float>(gradients[5]),
        .end_lengths = pointer<float>(gradients[6]),
    };
    nb::gil_scoped_release release;
    backward(p, result);
}

}  // namespace

NB_MODULE(CSA_MODULE, module) {
    module.def("forward", &run_forward);
    module.def("backward", &run_backward);
    module.def("runnable", &runnable);
}
