// One step along the path, for a vector of lanes: the segment that ends at a node, and whatever begins or ends there.
#pragma once

#include <algorithm>

#include "block.h"
#include "segment.h"

namespace continuous_attention {

// A score this far (in base 2) above the reference belongs to a node without length; it must stay finite.
constexpr float CEILING = 64.0f;
// The reference rises only when a score is this far above it: rescaling is rare then, and nothing overflows.
constexpr float SLACK = 10.0f;

// How long the segments are, and what lies before the first visible node.
struct Path {
    const float* lengths;  // or null: all are 1
    bool has_start_node;
    float start_length;
    int32_t nodes;

    explicit Path(const Group& group)
        : lengths(group.lengths()),
          has_start_node(group.problem.start_key != nullptr),
          start_length(group.problem.start_length),
          nodes(int32_t(group.problem.Lk)) {}
};

// One vector of a panel's lanes.
struct Column {
    Int lo, hi, start;
    Vec end;
    Column(const Panel& panel, int v)
        : lo(load(panel.lo + v * WIDTH)),
          hi(load(panel.hi + v * WIDTH)),
          start(load(panel.start + v * WIDTH)),
          end(load(panel.end + v * WIDTH)) {}
};

// A node on the way: its score in base 2, and p = 2^(score - reference) / 4.
struct Node {
    Vec score, p;
};
template <Digits DIGITS = Digits::all>
CSA_INLINE Node node(Vec score, Vec reference) {
    return {score, quarter_exp2<DIGITS>(score - reference)};
}

struct Segment {
    Shares unit;         // of a segment of length 1, in every lane
    Vec length;          // 0 in lanes that don't integrate it
    Vec left, right;     // what its nodes get; `right` with the masses held at this node
    Int first, last;     // lanes whose path begins or ends at this node
    Int between;         // lanes that see both its nodes
    Node before;         // the node that it comes from
};

// The segment from `before` to `here`, node i. EDGE: some lane's path begins or ends at it; only then `start` is read.
template <bool EDGE, bool LENGTHS, Digits DIGITS = Digits::all>
CSA_INLINE Segment segment_to(const Path& path, const Column& at, int32_t i, Node before, Node here, Node start) {
    Segment s;
    Int row = broadcast(i), counts;
    if (EDGE) {
        s.first = at.start == row;
        s.last = row + 1 == at.hi;
        s.between = (at.lo < row) & (row < at.hi);
        counts = s.between;
        if (path.has_start_node) {
            before = {s.first ? start.score : before.score, s.first ? start.p : before.p};
            counts |= s.first;
        }
    }
    s.before = before;
    s.unit = shares<DIGITS>(here.score - before.score, before.p, here.p);
    s.length = broadcast(LENGTHS ? path.lengths[i] : 1.0f);
    s.left = LENGTHS ? s.unit.left * s.length : s.unit.left;
    s.right = LENGTHS ? s.unit.right * s.length : s.unit.right;
    if (EDGE) {
        if (path.has_start_node) s.length = s.first ? broadcast(path.start_length) : s.length;
        s.left = counts ? s.unit.left * s.length : Vec{};
        s.right = counts ? s.unit.right * s.length : Vec{};
        s.length = counts ? s.length : Vec{};
        if (!path.has_start_node) s.right += s.first ? power(here.p) * path.start_length : Vec{};
        s.right += s.last ? power(here.p) * at.end : Vec{};
    }
    return s;
}

// Calls at_edge(i) for the nodes where some lane's path begins or ends, and at_inner(i) for the others, in order.
template <class AtEdge, class AtInner>
CSA_INLINE void for_each_node(Run run, Run inner, const AtEdge& at_edge, const AtInner& at_inner) {
    const auto [from, to] = inner_part(run, inner);
    int32_t i = run.from;
    for (; i < from; i++) at_edge(i);
    for (; i < to; i++) at_inner(i);
    for (; i < run.to; i++) at_edge(i);
}

}  // namespace continuous_attention
