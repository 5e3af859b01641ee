"""Register chains: the order of nodes in a tile that puts neighbours into one thread.

Integrating over a segment takes the scores of both its nodes. A tile of scores comes out of the matrix product spread
over threads, and moving columns between threads is slow. But which node stands in which column is free: it is the order
in which the rows of keys are loaded. In the accumulator of a matrix product, column

    j = 2 (C g + c) + b        c = 0 … C − 1, b = 0 or 1

belongs to the thread c of C, for every g. C is 4 where warps are stacked along the queries, and 4 times the warps
where they lie along the nodes. R = BLOCK_N / C columns belong to a thread, r = 2 g + b counting them. The node
`first + c (R − 1) + r` is loaded there, so every thread has a **chain** of R consecutive nodes. A chain's last node is
also the next one's first: it stands in two columns, and each holds the share from its own side. A tile of BLOCK_N
columns has BLOCK_N − C segments, each within one thread, and so many nodes further the next tile begins.

`split` gives the tile as R planes, plane r being position r of all chains; in registers it moves nothing. `join` undoes
it. Right under any layout, they are fast under this one.

Shape legend: BLOCK_M queries and BLOCK_N columns of a tile, C chains of R = 2G columns.
"""

import triton
import triton.language as tl


@triton.jit
def positions(BLOCK_N: tl.constexpr, C: tl.constexpr):
    """For each column, the node it holds, counted from the tile's first; and its position in the chain."""
    column = tl.arange(0, BLOCK_N)
    position = column // (2 * C) * 2 + column % 2
    return column // 2 % C * (BLOCK_N // C - 1) + position, position


@triton.jit
def split(x, BLOCK_M: tl.constexpr, C: tl.constexpr, G: tl.constexpr):
    """(BLOCK_M, BLOCK_N) → R planes (BLOCK_M, C)."""
    even, odd = tl.split(tl.reshape(x, [BLOCK_M, C * G, 2]))
    even, odd = _halve(even, BLOCK_M, C, G), _halve(odd, BLOCK_M, C, G)
    planes = ()
    for g in tl.static_range(G):
        planes = planes + (even[g], odd[g])
    return planes


@triton.jit
def join(planes, BLOCK_M: tl.constexpr, C: tl.constexpr, G: tl.constexpr):
    """R planes (BLOCK_M, C) → (BLOCK_M, BLOCK_N)."""
    even, odd = (), ()
    for g in tl.static_range(G):
        even = even + (planes[2 * g],)
        odd = odd + (planes[2 * g + 1],)
    even, odd = _double(even, BLOCK_M, C, G), _double(odd, BLOCK_M, C, G)
    return tl.reshape(tl.join(even, odd), [BLOCK_M, 2 * C * G])


@triton.jit
def _halve(x, BLOCK_M: tl.constexpr, C: tl.constexpr, G: tl.constexpr):
    """(BLOCK_M, G · C) → G planes (BLOCK_M, C)."""
    if G == 1:
        return (x,)
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, [BLOCK_M, 2, C * (G // 2)]), (0, 2, 1)))
        return _halve(low, BLOCK_M, C, G // 2) + _halve(high, BLOCK_M, C, G // 2)


@triton.jit
def _double(planes, BLOCK_M: tl.constexpr, C: tl.constexpr, G: tl.constexpr):
    """G planes (BLOCK_M, C) → (BLOCK_M, G · C)."""
    if G == 1:
        return planes[0]
    else:
        low, high = (), ()
        for g in tl.static_range(G // 2):
            low = low + (planes[g],)
            high = high + (planes[g + G // 2],)
        low, high = _double(low, BLOCK_M, C, G // 2), _double(high, BLOCK_M, C, G // 2)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [BLOCK_M, C * G])
