// What a kernel is asked for: tensors as pointers and strides. Everything a user can say (causal, windows, documents,
// boundaries, times) has become intervals, lengths and ends before it arrives here; see docs/math.md.
//
// Shape legend: B batch, Hq query heads, Hkv key/value heads, Lq queries, Lk nodes, D and Dv head dims.
#pragma once

#include <cstdint>

namespace continuous_attention {

enum class DType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

// A tensor (B, heads, rows, dim) whose last dim is contiguous; strides count elements.
struct Tensor4 {
    void* data;
    int64_t batch, head, row;
};

// A vector per batch element, (B, n); `batch` is 0 where all batch elements share it. `data` may be null.
template <class T>
struct PerBatch {
    T* data;
    int64_t batch;
};

struct Problem {
    DType dtype;  // of query, key, value, out and their gradients
    int64_t B, Hq, Hkv, Lq, Lk, D, Dv;
    float scale;  // a_i = scale · q·k_i
    Tensor4 query, key, value;
    PerBatch<const int32_t> intervals;  // (B or 1, Lq, 2): the nodes [lo, hi) that a query sees, within [0, Lk]
    PerBatch<const float> lengths;      // (B or 1, Lk): of the segment that ends at each node; null: all are 1
    const float* start_key;             // (Hkv, D), the node before the first visible one; null: none
    const float* start_value;           // (Hkv, Dv)
    float start_length;                 // of the segment from the start node (then > 0), or the mass held without one
    float end_length;                   // the mass held at the last visible node, where end_lengths is null
    PerBatch<const float> end_lengths;  // (B or 1, Lq): the same, one per query
    int32_t threads;                    // use at most this many
};

struct Result {
    Tensor4 out;     // (B, Hq, Lq, Dv)
    float* lse;      // (B, Hq, Lq) contiguous
    // For the backward pass; null: not wanted.
    void* out_rest;     // (B, Hq, Lq, Dv) contiguous: what rounding took from out, in half precision
    float* normalizer;  // (B, Hq, Lq, 2) contiguous: the reference r and the total z of each query, lse = ln(2^r z);
                        // lse itself would lose the digits that large scores take
};

struct Gradients {
    Tensor4 out, out_gradient;   // out of the forward pass, and its gradient
    const void* out_rest;        // of the forward pass; null: none
    const float* normalizer;     // of the forward pass
    const float* lse_gradient;   // (B, Hq, Lq) contiguous; null: zero
    Tensor4 query, key, value;   // written
    float* start_key;            // (B, Hkv, D), written: to be summed over the batch; null: not wanted
    float* start_value;          // (B, Hkv, Dv), written; null if start_key is
    float* lengths;              // (B, Hkv, Lk), written: to be summed over the heads; null: not wanted
    float* end_lengths;          // (B, Hq, Lq), written: to be summed over the heads; null: not wanted
};

}  // namespace continuous_attention
