"""What a block of queries sees: rows of memory, intervals, and the two ends of each query's path.

Offsets that can pass 2³¹ are int64; those inside a tile can't.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from continuous_attention.kernels.triton.segment import LN2, all_moments, exp2

CEILING = tl.constexpr(100.0)  # of x for nodes without length, which may lie anywhere; their weights are 0 · 2^100
LEAST = tl.constexpr(-(2.0**127))  # of scores that don't count: the reciprocal of a rise from it or to it is 0


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    group: int  # query heads per key/value head
    dim: int  # D, and the power of two that holds it
    dim_padded: int
    value_dim: int  # Dv, the same
    value_dim_padded: int
    query_stride: int  # from row to row
    key_stride: int
    value_stride: int
    wide: bool  # offsets pass 2³¹
    few: bool  # half precision
    block_m: int  # queries and columns of a tile
    block_n: int
    chains: int  # see chains.py
    stages: int  # how many tiles are loaded ahead


@triton.jit
def load_rows(pointer, index, stride, exists, width: tl.constexpr, width_padded: tl.constexpr):
    """Rows (len(index), width_padded) of memory; 0 beyond their width and, if `exists` is given, where one doesn't."""
    column = tl.arange(0, width_padded)
    place = pointer + index[:, None] * stride + column[None, :]
    if exists is not None:
        return tl.load(place, mask=exists[:, None] & (column < width)[None, :], other=0.0)
    elif width == width_padded:
        return tl.load(place)
    else:
        return tl.load(place, mask=(column < width)[None, :], other=0.0)


@triton.jit
def store_rows(pointer, index, rows, exists, width: tl.constexpr, width_padded: tl.constexpr):
    """Write rows of contiguous memory."""
    column = tl.arange(0, width_padded)
    place = pointer + index[:, None] * width + column[None, :]
    tl.store(place, rows.to(pointer.dtype.element_ty), mask=exists[:, None] & (column < width)[None, :])


@triton.jit
def load_vector(pointer, width: tl.constexpr, width_padded: tl.constexpr):
    """A vector (1, width_padded), 0 beyond its width."""
    column = tl.arange(0, width_padded)
    return tl.load(pointer + column, mask=column < width, other=0.0)[None, :]


@triton.jit
def dot_rows(a, b):
    """One product a_i · b_i per row, in float32."""
    return tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)


@triton.jit
def load_intervals(INTERVALS, row, exists):
    """[lo, hi) of each query, and whether it sees anything."""
    place = INTERVALS + row.to(tl.int64) * 2
    lo = tl.load(place, mask=exists, other=0)
    hi = tl.load(place + 1, mask=exists, other=0)
    return lo, hi, exists & (lo < hi)


@triton.jit
def bounds(lo, hi, sees, LK):
    """The first and the last begin, and the first and the last end, of the intervals that aren't empty."""
    return (
        tl.min(tl.where(sees, lo, LK), 0),
        tl.max(tl.where(sees, lo, 0), 0),
        tl.min(tl.where(sees, hi, LK), 0),
        tl.max(tl.where(sees, hi, 0), 0),
    )


@triton.jit
def sees_node(node, lo, hi):
    """(queries, nodes): lo <= node < hi, in one comparison."""
    length = tl.maximum(hi - lo, 0).to(tl.uint32)
    return (node[None, :] - lo[:, None]).to(tl.uint32) < length[:, None]


@triton.jit
def start_of_path(x_start, x_first, length, reference):
    """The segment from the start node to the first visible one: shares L and R and moment M, times its length."""
    p_start, p_first = exp2(x_start - reference), exp2(x_first - reference)
    twice_mass, difference, moment = all_moments(x_first - x_start, p_start, p_first)
    quarter = 0.25 * length
    difference *= 2 / LN2
    return quarter * (twice_mass - difference), quarter * (twice_mass + difference), moment * (length / (LN2 * LN2))
