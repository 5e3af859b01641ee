"""Few queries and many nodes: the nodes are divided over programs, whose results are merged by log-sum-exp.

All queries of a key/value head, those of its whole group, are rows of one tile, so keys and values are read once. A
program walks over some tiles of nodes; the tiles of neighbours share one node, as tiles always do, so each segment
belongs to one program. `merge_kernel` adds what lies before the first visible node and after the last one.

Warps lie along the nodes, so there are four chains (chains.py) per warp. Shape legend: as in forward.py; SPLITS
programs per key/value head.
"""

import triton
import triton.language as tl

from continuous_attention.kernels.triton.forward import attend_to_ends, attend_to_tile, finish, full_tiles
from continuous_attention.kernels.triton.rows import LEAST, bounds, load_intervals
from continuous_attention.kernels.triton.segment import exp2


@triton.jit
def rows_of_group(Q, INTERVALS, q_h, LQ, S: tl.constexpr):
    """Row r is query r mod LQ of the group's head r // LQ; the queries, and what they see."""
    index = tl.arange(0, S.block_m)
    member, row = index // LQ, index % LQ
    exists = member < S.group
    lo, hi, sees = load_intervals(INTERVALS, row, exists)
    column = tl.arange(0, S.dim_padded)
    place = member.to(tl.int64) * q_h + row.to(tl.int64) * S.query_stride
    q = tl.load(Q + place[:, None] + column[None, :], mask=sees[:, None] & (column < S.dim)[None, :], other=0.0)
    return q, (lo, hi, sees), exists


@triton.jit(do_not_specialize=["intervals_b", "lengths_b", "LQ", "LK", "tiles_per_split"])
def split_kernel(
    Q, K, V, INTERVALS, LENGTHS, SUMS, SCALES,
    q_b, q_h, k_b, k_h, v_b, v_h, intervals_b, lengths_b, scale, LQ, LK, tiles_per_split,
    S: tl.constexpr,
):  # fmt: skip
    """One program per stretch of nodes, key/value head and batch element: m, z and the weighted sum of values."""
    STEP: tl.constexpr = S.block_n - S.chains
    split = tl.program_id(0)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = b * tl.num_programs(1) + h
    q, seen, _ = rows_of_group(Q + b * q_b + h * S.group * q_h, INTERVALS + b * intervals_b, q_h, LQ, S)
    lo, hi, sees = seen
    if LENGTHS is not None:
        LENGTHS += b * lengths_b
    nodes = (K + b * k_b + h * k_h, V + b * v_b + h * v_h, LENGTHS, LK)
    limits = bounds(lo, hi, sees, LK)
    lo_min, lo_max, hi_min, hi_max = limits
    m = tl.full([S.block_m], LEAST, tl.float32)
    z = tl.full([S.block_m], 0.0, tl.float32)
    acc = tl.full([S.block_m, S.value_dim_padded], 0.0, tl.float32)

    begin = split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, tl.cdiv(hi_max - 1 - lo_min, STEP))
    before, full = full_tiles(lo_min, lo_max, hi_min, STEP)
    full_begin = tl.minimum(tl.maximum(begin, before), end)
    full_end = tl.maximum(tl.minimum(end, before + full), full_begin)
    for i in tl.range(full_begin, full_end, num_stages=S.stages):
        first = lo_min + i * STEP
        m, z, acc = attend_to_tile(q, nodes, seen, limits, first, scale, (m, z, acc), S, False, True)
    for i in tl.range(begin, end - (full_end - full_begin), num_stages=1):
        first = lo_min + tl.where(i < full_begin, i, i + (full_end - full_begin)) * STEP
        m, z, acc = attend_to_tile(q, nodes, seen, limits, first, scale, (m, z, acc), S, True, True)

    index = tl.arange(0, S.block_m)
    part = (head * tl.num_programs(0) + split) * S.block_m + index
    column = tl.arange(0, S.value_dim_padded)
    tl.store(SUMS + part[:, None] * S.value_dim_padded + column[None, :], acc)
    tl.store(SCALES + part * 2, m)
    tl.store(SCALES + part * 2 + 1, z)


@triton.jit(do_not_specialize=["intervals_b", "ends_b", "LQ", "LK", "SPLITS"])
def merge_kernel(
    Q, K, V, INTERVALS, START_KEY, START_VALUE, END_LENGTHS, SUMS, SCALES, OUT, LSE, REST, NORMALIZER,
    q_b, q_h, k_b, k_h, v_b, v_h, intervals_b, ends_b, scale, start_length, end_length, LQ, LK, SPLITS,
    S: tl.constexpr, HAS_END: tl.constexpr,
):  # fmt: skip
    """One program per key/value head and batch element: the ends of the path, the stretches of it, and the result."""
    h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = b * tl.num_programs(0) + h
    q, seen, exists = rows_of_group(Q + b * q_b + h * S.group * q_h, INTERVALS + b * intervals_b, q_h, LQ, S)
    index = tl.arange(0, S.block_m)
    if START_KEY is not None:
        START_KEY += h * S.dim
        START_VALUE += h * S.value_dim
    if END_LENGTHS is not None:
        end_length = tl.load(END_LENGTHS + b * ends_b + index % LQ, mask=exists, other=0.0)
    V += b * v_b + h * v_h
    nodes = (K + b * k_b + h * k_h, V, None, LK)
    ends = (START_KEY, START_VALUE, start_length, end_length)
    reference = tl.full([S.block_m], LEAST, tl.float32)
    m, z, acc = attend_to_ends(q, nodes, ends, seen, scale, reference, S, HAS_END)
    for split in range(0, SPLITS):
        part = (head * SPLITS + split) * S.block_m + index
        m_part, z_part = tl.load(SCALES + part * 2), tl.load(SCALES + part * 2 + 1)
        rise = tl.maximum(m, m_part)
        fade, fade_part = exp2(m - rise), exp2(m_part - rise)
        m = rise
        column = tl.arange(0, S.value_dim_padded)
        sums = tl.load(SUMS + part[:, None] * S.value_dim_padded + column[None, :])
        z = z * fade + z_part * fade_part
        acc = acc * fade[:, None] + sums * fade_part[:, None]

    # The group's heads follow one another, so row r of this head is row r of all its results.
    finish((m, z, acc), V, OUT, LSE, REST, NORMALIZER, head * S.group * LQ, index, exists, seen, S)
