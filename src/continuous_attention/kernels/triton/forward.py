"""The forward pass: a program has some queries of one head, and walks over the tiles of nodes that they see.

In a tile the scores x, in base 2, become weights by chains.py and segment.py:

    p = 2^(x − m)      T, R = shares(x_i − x_{i−1}, p_{i−1}, p_i)      w_i = R_{i−1} + T_i − R_i      z += Σ T

The reference m of a row is the largest score among a first sample of what it sees, and stays: rescaling would take an
eighth of all instructions. Where a row outgrows it, all rows of the program are done again with a running maximum.
Where segments have lengths the maximum runs from the beginning, over scores plus the logarithm of a length, so that
weights stay near 1 in half precision. Tiles that all rows see whole come first, then those that hold an end of
somebody's interval; tiles that nobody sees are skipped.

What lies before the first visible node and after the last one (docs/math.md §4) stands apart from the tiles: it takes
one score per query, found by gathering these nodes' keys.

Shape legend: HQ query heads, LQ queries, LK nodes. `state` is (m, z, weighted sum of values), `seen` (lo, hi, whether
lo < hi) per query, `nodes` (K, V, LENGTHS, LK) and `ends` (START_KEY, START_VALUE, start length, end length).
"""

import triton
import triton.language as tl

from continuous_attention.kernels.triton.chains import join, positions, split
from continuous_attention.kernels.triton.rows import (
    CEILING,
    LEAST,
    bounds,
    dot_rows,
    load_intervals,
    load_rows,
    load_vector,
    sees_node,
    start_of_path,
    store_rows,
)
from continuous_attention.kernels.triton.segment import HALF, LN2, LOG2E, all_shares, exp2, few_shares


@triton.jit
def attend_to_ends(q, nodes, ends, seen, scale, reference, S: tl.constexpr, HAS_END: tl.constexpr):
    """What lies before the first visible node and after the last one; m is at least the reference."""
    K, V, _, _ = nodes
    START_KEY, START_VALUE, start_length, end_length = ends
    lo, hi, sees = seen
    first, last = lo.to(tl.int64), hi.to(tl.int64) - 1
    x_first = scale * dot_rows(q, load_rows(K, first, S.key_stride, sees, S.dim, S.dim_padded))
    m = tl.maximum(reference, x_first + log2_of_length(start_length))
    x_start, x_last = x_first, x_first
    if START_KEY is not None:
        x_start = scale * dot_rows(q, load_vector(START_KEY, S.dim, S.dim_padded))
        m = tl.maximum(m, x_start + log2_of_length(start_length))
    if HAS_END:
        x_last = scale * dot_rows(q, load_rows(K, last, S.key_stride, sees, S.dim, S.dim_padded))
        m = tl.maximum(m, x_last + log2_of_length(end_length))

    value = load_rows(V, first, S.value_stride, sees, S.value_dim, S.value_dim_padded).to(tl.float32)
    if START_KEY is not None:
        left, right, _ = start_of_path(x_start, x_first, start_length * LN2, m)
        z = left + right
        acc = left[:, None] * load_vector(START_VALUE, S.value_dim, S.value_dim_padded) + right[:, None] * value
    else:
        z = tl.where(start_length > 0, exp2(x_first - m) * (start_length * LN2), 0.0)
        acc = z[:, None] * value
    if HAS_END:
        held = tl.where(end_length > 0, exp2(x_last - m) * (end_length * LN2), 0.0)
        value = load_rows(V, last, S.value_stride, sees, S.value_dim, S.value_dim_padded)
        z += held
        acc += held[:, None] * value.to(tl.float32)
    return m, tl.where(sees, z, 0.0), acc


@triton.jit
def log2_of_length(length):
    """How much a length adds to the score of what weighs that much; nothing weighs nothing."""
    return tl.where(length > 0, tl.log2(length), LEAST / 2)


@triton.jit
def log2_of_extent(LENGTHS, node, lo, hi, LK):
    """The same for a node: the longer of the segments before and after it that each query sees."""
    before = log2_of_length(tl.load(LENGTHS + node, mask=(node >= 0) & (node < LK), other=0.0))[None, :]
    after = log2_of_length(tl.load(LENGTHS + node + 1, mask=(node >= -1) & (node < LK - 1), other=0.0))[None, :]
    node = node[None, :]
    before = tl.where(lo[:, None] < node, before, LEAST / 2)
    return tl.maximum(before, tl.where(node + 1 < hi[:, None], after, LEAST / 2))


@triton.jit
def wanted_nodes(node, seen, bounds):
    """The nodes that at least one query sees: no other is read."""
    lo, hi, _ = seen
    lo_min, lo_max, hi_min, hi_max = bounds
    wanted = (lo_min <= node) & (node < hi_max)
    if hi_min < lo_max:  # two queries see nothing in common: there may be gaps between them
        wanted = wanted & (tl.max(sees_node(node, lo, hi).to(tl.int32), 0) > 0)
    return wanted


@triton.jit
def attend_to_tile(
    q, nodes, seen, bounds, first, scale, state, S: tl.constexpr, EDGE: tl.constexpr, RUNNING: tl.constexpr
):
    """The segments of the tile that begins at the node `first`, added to the state."""
    R: tl.constexpr = S.block_n // S.chains
    K, V, LENGTHS, LK = nodes
    lo, hi, _ = seen
    m, z, acc = state
    offset, _ = positions(S.block_n, S.chains)
    node = first + offset
    wanted = None
    if EDGE:
        wanted = wanted_nodes(node, seen, bounds)
    place = node.to(tl.int64) if S.wide else node
    k = load_rows(K, place, S.key_stride, wanted, S.dim, S.dim_padded)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if EDGE:
        sees = sees_node(node, lo, hi)
    if RUNNING:
        top = s * scale
        if LENGTHS is not None:
            top += log2_of_extent(LENGTHS, node, lo, hi, LK)
        if EDGE:
            top = tl.where(sees, top, LEAST)
        rise = tl.maximum(m, tl.max(top, 1))
        fade = exp2(m - rise)
        m, z, acc = rise, z * fade, acc * fade[:, None]
    x = s * scale - m[:, None]
    if LENGTHS is not None:
        x = tl.where(x > CEILING, CEILING, x)  # nodes without length may lie anywhere above; a NaN stays
    if EDGE:
        x = tl.where(sees, x, LEAST)
    p = exp2(x)
    xs, ps = split(x, S.block_m, S.chains, R // 2), split(p, S.block_m, S.chains, R // 2)
    halves = ps
    if S.few:
        halves = split(p * HALF, S.block_m, S.chains, R // 2)
    chain = first + tl.arange(0, S.chains) * (R - 1)
    weights = ()
    total = ps[0]
    before = ps[0]
    for r in tl.static_range(1, R):
        rise = xs[r] - xs[r - 1]
        if S.few:
            mass, right = few_shares(rise, ps[r - 1], ps[r], halves[r - 1], halves[r])
        else:
            mass, right = all_shares(rise, ps[r - 1], ps[r])
        if LENGTHS is not None:
            length = tl.load(LENGTHS + chain + r, mask=chain + r < LK, other=0.0)[None, :]
            mass, right = mass * length, right * length
        if r == 1:
            weights = weights + (mass - right,)
            total = mass
        else:
            weights = weights + ((before + mass) - right,)
            total += mass
        before = right
    w = join(weights + (before,), S.block_m, S.chains, R // 2)
    v = load_rows(V, place, S.value_stride, wanted, S.value_dim, S.value_dim_padded)
    return m, z + tl.sum(total, 1), tl.dot(w.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit
def largest_of_sample(q, nodes, seen, first, end, scale, S: tl.constexpr):
    """The largest score that each query sees among some nodes from `first` on, and at its own first one."""
    K, _, _, _ = nodes
    lo, hi, sees = seen
    offset = tl.arange(0, S.block_n)
    node = first + offset
    k = load_rows(K, node.to(tl.int64), S.key_stride, node < end, S.dim, S.dim_padded)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    own = dot_rows(q, load_rows(K, lo.to(tl.int64), S.key_stride, sees, S.dim, S.dim_padded))
    return tl.maximum(own * scale, tl.max(tl.where(sees_node(node, lo, hi), s * scale, LEAST), 1))


@triton.jit
def full_tiles(begin, lo_max, hi_min, STEP: tl.constexpr):
    """Of tiles that begin every STEP nodes from `begin` on: how many come before those that all queries see whole, and
    how many these are."""
    before = tl.cdiv(tl.maximum(lo_max - begin, 0), STEP)
    return before, tl.maximum(tl.maximum(hi_min - 1 - begin, 0) // STEP - before, 0)


@triton.jit
def attend(
    q, nodes, ends, seen, scale, S: tl.constexpr, HAS_END: tl.constexpr, RUNNING: tl.constexpr, ALL_EDGES: tl.constexpr
):
    """The whole path of a block of queries."""
    STEP: tl.constexpr = S.block_n - S.chains
    lo, hi, sees = seen
    limits = bounds(lo, hi, sees, nodes[3])
    lo_min, lo_max, hi_min, hi_max = limits
    reference = tl.full([S.block_m], LEAST, tl.float32)
    if not RUNNING:
        reference = largest_of_sample(q, nodes, seen, lo_max, hi_max, scale, S)
    m, z, acc = attend_to_ends(q, nodes, ends, seen, scale, reference, S, HAS_END)
    tiles = tl.cdiv(hi_max - 1 - lo_min, STEP)
    before, full = full_tiles(lo_min, lo_max, hi_min, STEP)
    if ALL_EDGES:
        full = 0
    for i in tl.range(0, full, num_stages=S.stages):
        first = lo_min + (before + i) * STEP
        m, z, acc = attend_to_tile(q, nodes, seen, limits, first, scale, (m, z, acc), S, False, RUNNING)
    for i in tl.range(0, tiles - full, num_stages=1):
        first = lo_min + tl.where(i < before, i, i + full) * STEP
        m, z, acc = attend_to_tile(q, nodes, seen, limits, first, scale, (m, z, acc), S, True, RUNNING)
    return m, z, acc


@triton.jit
def finish(state, V, OUT, LSE, REST, NORMALIZER, first, row, exists, seen, S: tl.constexpr):
    """Divide by z and write the results of the rows that are `row` behind the row `first`, an int64.

    Without any length, the last visible value is the limit.
    """
    m, z, acc = state
    _, hi, sees = seen
    OUT, LSE = OUT + first * S.value_dim, LSE + first
    has_length = z != 0  # also where z is NaN
    out = acc / tl.where(has_length, z, 1.0)[:, None]
    last = hi.to(tl.int64) - 1
    limit = load_rows(V, last, S.value_stride, sees & (z == 0), S.value_dim, S.value_dim_padded)
    out = tl.where((sees & has_length)[:, None], out, limit.to(tl.float32))
    store_rows(OUT, row, out, exists, S.value_dim, S.value_dim_padded)
    z = tl.where(sees, z, 0.0) * LOG2E
    tl.store(LSE + row, tl.where(z == 0, float("-inf"), (m + tl.log2(z)) * LN2), mask=exists)
    if NORMALIZER is not None:
        NORMALIZER += first * 2
        tl.store(NORMALIZER + row * 2, m, mask=exists)
        tl.store(NORMALIZER + row * 2 + 1, z, mask=exists)
    if REST is not None:
        rest = out - out.to(OUT.dtype.element_ty).to(tl.float32)
        store_rows(REST + first * S.value_dim, row, rest, exists, S.value_dim, S.value_dim_padded)


@triton.jit(do_not_specialize=["intervals_b", "lengths_b", "ends_b", "HQ", "LQ", "LK"])
def forward_kernel(
    Q, K, V, INTERVALS, LENGTHS, START_KEY, START_VALUE, END_LENGTHS, OUT, LSE, REST, NORMALIZER,
    q_b, q_h, k_b, k_h, v_b, v_h, intervals_b, lengths_b, ends_b, scale, start_length, end_length, HQ, LQ, LK,
    S: tl.constexpr, HAS_END: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One program per block of queries, head and batch element; the last queries, which may see most, come first."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    offset = tl.arange(0, S.block_m)
    row = block * S.block_m + offset
    exists = row < LQ
    lo, hi, sees = load_intervals(INTERVALS + b * intervals_b, row, exists)
    if END_LENGTHS is not None:
        end_length = tl.load(END_LENGTHS + b * ends_b + row, mask=exists, other=0.0)
    if START_KEY is not None:
        START_KEY += h // S.group * S.dim
        START_VALUE += h // S.group * S.value_dim
    if LENGTHS is not None:
        LENGTHS += b * lengths_b
    first = block.to(tl.int64) * S.block_m
    Q += b * q_b + h * q_h + first * S.query_stride
    q = load_rows(Q, offset.to(tl.int64), S.query_stride, sees, S.dim, S.dim_padded)

    V += b * v_b + h // S.group * v_h
    nodes = (K + b * k_b + h // S.group * k_h, V, LENGTHS, LK)
    ends, seen = (START_KEY, START_VALUE, start_length, end_length), (lo, hi, sees)
    RUNNING: tl.constexpr = LENGTHS is not None
    m, z, acc = attend(q, nodes, ends, seen, scale, S, HAS_END, RUNNING, False)
    if not RUNNING:
        outgrown = sees & ~(z < LIMIT)  # also where z is NaN
        if tl.max(outgrown.to(tl.int32), 0) > 0:
            m, z, acc = attend(q, nodes, ends, seen, scale, S, HAS_END, True, True)
    first += (b * HQ + h) * LQ
    finish((m, z, acc), V, OUT, LSE, REST, NORMALIZER, first, offset, exists, seen, S)
