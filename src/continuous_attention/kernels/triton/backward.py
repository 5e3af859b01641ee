"""The backward pass: the scores are computed again, tile after tile, and turned into the gradients of all that went in.

With g_i = dO·v_i − dO·o + dlse, and weights w, M relative to e^lse (docs/math.md §6):

    y_i = M_i (g_i − g_{i−1})      dA_i = w_i g_i − y_i + y_{i+1}
    dV = Wᵀ dO      dK = scale · dAᵀ Q      dQ = scale · dA K

Three or four kernels run, one after the other:

1. `rows_kernel`: for each query what stands apart from the tiles: the reference lse, dO·o − dlse, and all that the
   start node and the held ends give, in sums that belong to one program each.
2. `schedule_kernel`: for each tile of nodes, which blocks of queries see it.
3. `nodes_kernel`: a program owns a tile of nodes of a key/value head, and walks over these blocks. It adds to dQ, as
   other programs do, in no fixed order; or, if the order has to be fixed, it leaves dQ to
4. `queries_kernel`, where a program owns a block of queries.

The nodes at the ends of chains (chains.py) stand in two columns, so in two rows of a tile's dK and dV; these rows go to
a scratch of 8 per tile, and launch.py adds them up.

dA comes out times `KAPPA`, which saves a multiplication per score; in float16 also times a gain that brings the largest
possible number near the largest that float16 holds, because most are far smaller. Shape legend: as in forward.py;
LQ_PAD is LQ rounded up to whole blocks.
"""

import triton
import triton.language as tl

from continuous_attention.kernels.triton.chains import join, positions, split
from continuous_attention.kernels.triton.forward import full_tiles, wanted_nodes
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
from continuous_attention.kernels.triton.segment import LN2, all_moments, exp2, few_moments

KAPPA = tl.constexpr(LN2.value**2 / 4)
ROW_FIELDS = 7  # of ROWS: reference, mean, weight and dA of the first and of the last visible node, rest of reference


@triton.jit
def load_gain(GAIN):
    """The gain of float16, or None, and KAPPA times it."""
    if GAIN is None:
        return None, KAPPA
    else:
        gain = tl.load(GAIN)
        return gain, KAPPA * gain


@triton.jit(do_not_specialize=["intervals_b", "ends_b", "HEADS", "HQ", "LQ", "LQ_PAD"])
def rows_kernel(
    Q, K, V, OUT, REST, NORMALIZER, OUT_GRADIENT, LSE_GRADIENT, INTERVALS, START_KEY, START_VALUE, END_LENGTHS,
    GAIN, ROWS, QUERY_GRADIENT, START_KEY_PARTS, START_VALUE_PARTS, END_GRADIENT,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, G_STRIDE: tl.constexpr, intervals_b, ends_b,
    scale, start_length, end_length, HEADS, HQ, LQ, LQ_PAD,
    S: tl.constexpr, HAS_END: tl.constexpr,
):  # fmt: skip
    """One program per block of queries, head and batch element."""
    block = tl.program_id(0)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = b * HQ + h
    row = block * S.block_m + tl.arange(0, S.block_m)
    exists = row < LQ
    lo, hi, sees = load_intervals(INTERVALS + b * intervals_b, row, exists)
    first, last, place = lo.to(tl.int64), hi.to(tl.int64) - 1, row.to(tl.int64)
    K += b * k_b + h // S.group * k_h
    V += b * v_b + h // S.group * v_h
    q = load_rows(Q + b * q_b + h * q_h, place, S.query_stride, sees, S.dim, S.dim_padded)
    d_out = load_rows(OUT_GRADIENT + b * g_b + h * g_h, place, G_STRIDE, sees, S.value_dim, S.value_dim_padded)
    out = load_rows(OUT + head * LQ * S.value_dim, place, S.value_dim, sees, S.value_dim, S.value_dim_padded)
    mean = dot_rows(d_out, out)
    if REST is not None:
        rest = load_rows(REST + head * LQ * S.value_dim, place, S.value_dim, sees, S.value_dim, S.value_dim_padded)
        mean += dot_rows(d_out, rest)
    m = tl.load(NORMALIZER + (head * LQ + row) * 2, mask=sees, other=0.0)
    z = tl.load(NORMALIZER + (head * LQ + row) * 2 + 1, mask=sees, other=0.0)
    if LSE_GRADIENT is not None:
        mean -= tl.load(LSE_GRADIENT + head * LQ + row, mask=sees & (z != 0), other=0.0)
    # lse in two numbers, because scores may be large. Rows without length or without nodes stand so high that all
    # their weights are 0.
    reference = tl.where(z == 0, -LEAST, m)
    rest_of_reference = tl.where(z == 0, 0.0, tl.log2(z))

    k_first = load_rows(K, first, S.key_stride, sees, S.dim, S.dim_padded).to(tl.float32)
    x_first = scale * dot_rows(q, k_first) - reference
    g_first = dot_rows(d_out, load_rows(V, first, S.value_stride, sees, S.value_dim, S.value_dim_padded)) - mean
    if START_KEY is not None:
        k_start = load_vector(START_KEY + h // S.group * S.dim, S.dim, S.dim_padded)
        v_start = load_vector(START_VALUE + h // S.group * S.value_dim, S.value_dim, S.value_dim_padded)
        g_start = dot_rows(d_out, v_start) - mean
        left, right, moment = start_of_path(
            scale * dot_rows(q, k_start) - reference, x_first, start_length, rest_of_reference
        )
        w_first, a_first = right, right * g_first + moment * (g_start - g_first)
        a_start = left * g_start + moment * (g_first - g_start)
        d_q = a_first[:, None] * k_first + a_start[:, None] * k_start
        if START_KEY_PARTS is not None:
            part = head * tl.num_programs(0) + block
            column = tl.arange(0, S.dim_padded)
            total = tl.sum(a_start[:, None] * q.to(tl.float32), 0) * (scale * LN2)
            tl.store(START_KEY_PARTS + part * S.dim + column, total, mask=column < S.dim)
            column = tl.arange(0, S.value_dim_padded)
            total = tl.sum(left[:, None] * d_out.to(tl.float32), 0)
            tl.store(START_VALUE_PARTS + part * S.value_dim + column, total, mask=column < S.value_dim)
    else:
        w_first = tl.where(start_length > 0, exp2(x_first - rest_of_reference) * start_length, 0.0)
        a_first = w_first * g_first
        d_q = a_first[:, None] * k_first
    w_last = tl.where(sees & (z == 0), 1.0, 0.0)
    a_last = tl.zeros_like(w_last)
    if HAS_END:
        if END_LENGTHS is not None:
            end_length = tl.load(END_LENGTHS + b * ends_b + row, mask=exists, other=0.0)
        k_last = load_rows(K, last, S.key_stride, sees, S.dim, S.dim_padded).to(tl.float32)
        g_last = dot_rows(d_out, load_rows(V, last, S.value_stride, sees, S.value_dim, S.value_dim_padded)) - mean
        p_last = exp2(tl.minimum(scale * dot_rows(q, k_last) - reference - rest_of_reference, CEILING))
        held = tl.where(end_length > 0, p_last * end_length, 0.0)
        w_last, a_last = w_last + held, held * g_last
        d_q += a_last[:, None] * k_last
        if END_GRADIENT is not None:
            tl.store(END_GRADIENT + head * LQ + row, p_last * g_last, mask=exists)
    ROWS += head * LQ_PAD + row
    plane = HEADS.to(tl.int64) * LQ_PAD
    # A weight is a quarter of what the formulas give.
    if S.few:
        reference, rest_of_reference = reference + rest_of_reference + 2, tl.zeros_like(reference)
    else:
        rest_of_reference += 2
    tl.store(ROWS, reference)
    tl.store(ROWS + 6 * plane, rest_of_reference)
    tl.store(ROWS + plane, mean)
    tl.store(ROWS + 2 * plane, w_first)
    tl.store(ROWS + 3 * plane, a_first)
    tl.store(ROWS + 4 * plane, w_last)
    tl.store(ROWS + 5 * plane, a_last)
    _, kappa = load_gain(GAIN)
    store_rows(QUERY_GRADIENT + head * LQ_PAD * S.dim, place, d_q * kappa, row < LQ_PAD, S.dim, S.dim_padded)


@triton.jit(do_not_specialize=["intervals_b", "LQ", "tiles"])
def schedule_kernel(
    INTERVALS, SCHEDULE, intervals_b, LQ, tiles, STEP: tl.constexpr, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr
):
    """For each tile of nodes, which blocks of queries see it: from, to; and between these, which see it whole.

    A tile that is seen whole holds no end of an interval. Where these blocks aren't one run, none count as such.
    """
    tile, b = tl.program_id(0), tl.program_id(1)
    INTERVALS += b.to(tl.int64) * intervals_b
    begin = tile * STEP
    end = begin + STEP
    blocks = tl.cdiv(LQ, BLOCK_M)
    first, last, count = blocks, 0, 0
    full_first, full_last = blocks, 0
    for start in range(0, blocks, AT_ONCE):
        block = start + tl.arange(0, AT_ONCE)
        row = block[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        lo, hi, sees = load_intervals(INTERVALS, row, row < LQ)
        some = tl.max((sees & (lo < end) & (hi > begin)).to(tl.int32), 1) > 0
        whole = tl.min((sees & (lo < begin) & (hi > end)).to(tl.int32), 1) > 0
        first = tl.minimum(first, tl.min(tl.where(some, block, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(some, block + 1, 0), 0))
        full_first = tl.minimum(full_first, tl.min(tl.where(whole, block, blocks), 0))
        full_last = tl.maximum(full_last, tl.max(tl.where(whole, block + 1, 0), 0))
        count += tl.sum(whole.to(tl.int32), 0)
    if count != full_last - full_first:  # nor where there are none
        full_first, full_last = first, first
    SCHEDULE += (b * tiles + tile) * 4
    tl.store(SCHEDULE, first)
    tl.store(SCHEDULE + 1, last)
    tl.store(SCHEDULE + 2, full_first)
    tl.store(SCHEDULE + 3, full_last)


@triton.jit
def gradients_of_tile(
    s,
    d_w,
    LENGTHS,
    first,
    lo,
    hi,
    of_row,
    gains,
    scale,
    LK,
    S: tl.constexpr,
    EDGE: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """From scores and products dO·v: the weights, dA times KAPPA, and, if LENGTH, dh of the segment before a node."""
    R: tl.constexpr = S.block_n // S.chains
    offset, _ = positions(S.block_n, S.chains)
    reference, rest_of_reference, mean = of_row
    x = s * scale - reference[:, None]
    if not S.few:
        x -= rest_of_reference[:, None]
    if LENGTHS is not None:
        x = tl.where(x > CEILING, CEILING, x)  # a NaN stays
    if EDGE:
        x = tl.where(sees_node(first + offset, lo, hi), x, LEAST)
    p = exp2(x)
    xs, ps = split(x, S.block_m, S.chains, R // 2), split(p, S.block_m, S.chains, R // 2)
    gs = split(d_w, S.block_m, S.chains, R // 2)
    gain, kappa = gains
    mean = (mean * kappa)[:, None]
    chain = first + tl.arange(0, S.chains) * (R - 1)
    weights, gradients, lengths = (), (), (ps[0] * 0.0,)
    right, y_before = ps[0], ps[0]
    for r in tl.static_range(1, R):
        rise = xs[r] - xs[r - 1]
        if S.few:
            twice_mass, difference, moment = few_moments(rise, ps[r - 1], ps[r])
        else:
            twice_mass, difference, moment = all_moments(rise, ps[r - 1], ps[r])
        if EDGE:
            twice_mass = tl.where(sees_node(chain + (r - 1), lo, hi - 1), twice_mass, 0.0)
        g = gs[r - 1] * kappa - mean
        if LENGTH:
            left_share = twice_mass - (2 / LN2) * difference
            right_share = twice_mass + (2 / LN2) * difference
            lengths = lengths + (g * left_share + (gs[r] * kappa - mean) * right_share,)
        if LENGTHS is not None:
            length = tl.load(LENGTHS + chain + r, mask=chain + r < LK, other=0.0)[None, :]
            twice_mass, difference, moment = twice_mass * length, difference * length, moment * length
        if gain is not None:
            moment *= gain
        y = moment * (gs[r] - gs[r - 1])
        if r == 1:
            w = twice_mass - (2 / LN2) * difference
            gradient = g * w + y
        else:
            w = (right + twice_mass) - (2 / LN2) * difference
            gradient = g * w + (y - y_before)
        weights, gradients = weights + (w,), gradients + (gradient,)
        right, y_before = twice_mass + (2 / LN2) * difference, y
    weights = weights + (right,)
    gradients = gradients + ((gs[R - 1] * kappa - mean) * right - y_before,)
    w = join(weights, S.block_m, S.chains, R // 2)
    d_s = join(gradients, S.block_m, S.chains, R // 2)
    d_length = tl.full([S.block_n], 0.0, tl.float32)
    if LENGTH:
        d_length = tl.sum(join(lengths, S.block_m, S.chains, R // 2), 0)
    return w, d_s, d_length


@triton.jit
def nodes_block(
    k, v, Q, OUT_GRADIENT, ROWS, INTERVALS, LENGTHS, QUERY_GRADIENT, DESCRIPTOR, first, block, row_of_head, plane,
    d_k, d_v, d_length, gains, scale, LQ, LK, G_STRIDE: tl.constexpr,
    S: tl.constexpr, EDGE: tl.constexpr, FUSED: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """What one block of queries gives to a tile of nodes, and the tile to it."""
    offset, position = positions(S.block_n, S.chains)
    row = block * S.block_m + tl.arange(0, S.block_m)
    lo, hi, exists = row, row, None
    if EDGE:
        lo, hi, exists = load_intervals(INTERVALS, row, row < LQ)
    index, begin = tl.arange(0, S.block_m), tl.cast(block, tl.int64) * S.block_m
    far = index.to(tl.int64) if S.wide else index
    q = load_rows(Q + begin * S.query_stride, far, S.query_stride, exists, S.dim, S.dim_padded)
    d_out = load_rows(OUT_GRADIENT + begin * G_STRIDE, far, G_STRIDE, exists, S.value_dim, S.value_dim_padded)
    reference, mean = tl.load(ROWS + begin + index), tl.load(ROWS + plane + begin + index)
    of_row = (reference, reference, mean)
    if not S.few:
        of_row = (reference, tl.load(ROWS + 6 * plane.to(tl.int64) + begin + index), mean)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    d_w = tl.dot(d_out, tl.trans(v), input_precision="ieee")
    w, d_s, of_lengths = gradients_of_tile(s, d_w, LENGTHS, first, lo, hi, of_row, gains, scale, LK, S, EDGE, LENGTH)
    if FUSED:  # without what is added below: `rows_kernel` gave that to dQ
        d_q = tl.dot(d_s.to(k.dtype), k, input_precision="ieee")
        if DESCRIPTOR is not None:
            DESCRIPTOR.atomic_add([row_of_head + block * S.block_m, 0], d_q)
        else:
            column = tl.arange(0, S.dim_padded)
            target = QUERY_GRADIENT + row.to(tl.int64)[:, None] * S.dim + column[None, :]
            tl.atomic_add(target, d_q, mask=(column < S.dim)[None, :], sem="relaxed")
    if EDGE:
        # A node that stands in two columns gets what belongs to it as an end in the first of them.
        node = tl.where(position < S.block_n // S.chains - 1, first + offset, -2)[None, :]
        at_first, at_last = node == lo[:, None], node == hi[:, None] - 1
        _, kappa = gains
        ENDS = ROWS + 2 * plane.to(tl.int64) + begin + index
        w_first, a_first = tl.load(ENDS), tl.load(ENDS + plane) * kappa
        ENDS += 2 * plane.to(tl.int64)
        w_last, a_last = tl.load(ENDS), tl.load(ENDS + plane) * kappa
        w += tl.where(at_first, w_first[:, None], 0.0) + tl.where(at_last, w_last[:, None], 0.0)
        d_s += tl.where(at_first, a_first[:, None], 0.0) + tl.where(at_last, a_last[:, None], 0.0)
    d_s = d_s.to(k.dtype)
    d_v = tl.dot(tl.trans(w.to(k.dtype)), d_out, d_v, input_precision="ieee")
    d_k = tl.dot(tl.trans(d_s), q, d_k, input_precision="ieee")
    return d_k, d_v, d_length + of_lengths


@triton.jit(do_not_specialize=["intervals_b", "lengths_b", "HEADS", "HQ", "LQ", "LK", "LQ_PAD", "tiles"])
def nodes_kernel(
    Q, K, V, OUT_GRADIENT, ROWS, INTERVALS, LENGTHS, SCHEDULE, GAIN,
    KEY_GRADIENT, VALUE_GRADIENT, KEY_SHARED, VALUE_SHARED, LENGTH_PARTS, QUERY_GRADIENT, DESCRIPTOR,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, G_STRIDE: tl.constexpr, intervals_b, lengths_b,
    scale, HEADS, HQ, LQ, LK, LQ_PAD, tiles,
    S: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """One program per tile of nodes, key/value head and batch element."""
    STEP: tl.constexpr = S.block_n - S.chains
    tile = tl.program_id(0)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    key_head = b * tl.num_programs(1) + h
    first = tile * STEP
    offset, position = positions(S.block_n, S.chains)
    node = first + offset
    INTERVALS += b * intervals_b
    LENGTH: tl.constexpr = LENGTH_PARTS is not None
    if LENGTHS is not None:
        LENGTHS += b * lengths_b
    SCHEDULE += (tl.where(intervals_b == 0, 0, b) * tiles + tile) * 4
    from_, to = tl.load(SCHEDULE), tl.load(SCHEDULE + 1)
    full_from, full_to = tl.load(SCHEDULE + 2), tl.load(SCHEDULE + 3)

    # Nodes that nobody sees may hold anything. Blocks that see the whole tile leave none.
    seen = tl.full([S.block_n], full_from < full_to, tl.int32)
    for block in tl.range(from_, tl.where(full_from < full_to, from_, to), num_stages=1):
        row = block * S.block_m + tl.arange(0, S.block_m)
        lo, hi, _ = load_intervals(INTERVALS, row, row < LQ)
        seen = tl.maximum(seen, tl.max(sees_node(node, lo, hi).to(tl.int32), 0))
    wanted = seen > 0
    k = load_rows(K + b * k_b + h * k_h, node.to(tl.int64), S.key_stride, wanted, S.dim, S.dim_padded)
    v = load_rows(V + b * v_b + h * v_h, node.to(tl.int64), S.value_stride, wanted, S.value_dim, S.value_dim_padded)
    d_k = tl.full([S.block_n, S.dim_padded], 0.0, tl.float32)
    d_v = tl.full([S.block_n, S.value_dim_padded], 0.0, tl.float32)
    d_length = tl.full([S.block_n], 0.0, tl.float32)
    gains = load_gain(GAIN)
    plane = HEADS * LQ_PAD  # of one field of ROWS; all of them may pass 2³¹
    for member in tl.range(0, S.group, num_stages=1):
        q_h_here = h * S.group + member
        head = b * HQ + q_h_here
        OF_QUERY = Q + b * q_b + q_h_here * q_h
        OF_OUT = OUT_GRADIENT + b * g_b + q_h_here * g_h
        OF_ROWS, OF_GRADIENT = ROWS + head * LQ_PAD, QUERY_GRADIENT + head * LQ_PAD * S.dim
        row_of_head = (head * LQ_PAD).to(tl.int32)
        for block in tl.range(full_from, full_to, num_stages=S.stages):
            d_k, d_v, d_length = nodes_block(
                k, v, OF_QUERY, OF_OUT, OF_ROWS, INTERVALS, LENGTHS, OF_GRADIENT, DESCRIPTOR, first, block, row_of_head,
                plane, d_k, d_v, d_length, gains, scale, LQ, LK, G_STRIDE, S, False, FUSED, LENGTH,
            )  # fmt: skip
        for i in tl.range(from_, to - (full_to - full_from), num_stages=1):
            block = tl.where(i < full_from, i, i + (full_to - full_from))
            d_k, d_v, d_length = nodes_block(
                k, v, OF_QUERY, OF_OUT, OF_ROWS, INTERVALS, LENGTHS, OF_GRADIENT, DESCRIPTOR, first, block, row_of_head,
                plane, d_k, d_v, d_length, gains, scale, LQ, LK, G_STRIDE, S, True, FUSED, LENGTH,
            )  # fmt: skip

    d_k *= scale * LN2 / gains[1]
    R: tl.constexpr = S.block_n // S.chains
    inside = (position > 0) & (position < R - 1) & (node < LK)
    chain = tl.arange(0, S.block_n) // 2 % S.chains
    shared = (key_head * tiles + tile) * S.chains * 2 + chain * 2 + tl.where(position == 0, 0, 1)
    ends = (position == 0) | (position == R - 1)
    node = node.to(tl.int64)
    store_rows(KEY_GRADIENT + key_head * LK * S.dim, node, d_k, inside, S.dim, S.dim_padded)
    store_rows(VALUE_GRADIENT + key_head * LK * S.value_dim, node, d_v, inside, S.value_dim, S.value_dim_padded)
    store_rows(KEY_SHARED, shared, d_k, ends, S.dim, S.dim_padded)
    store_rows(VALUE_SHARED, shared, d_v, ends, S.value_dim, S.value_dim_padded)
    if LENGTH:
        tl.store(LENGTH_PARTS + key_head * LK + node, d_length / gains[1], mask=(position > 0) & (node < LK))


@triton.jit(do_not_specialize=["intervals_b", "lengths_b", "HEADS", "HQ", "LQ", "LK", "LQ_PAD"])
def queries_kernel(
    Q, K, V, OUT_GRADIENT, ROWS, INTERVALS, LENGTHS, SUM, GAIN, QUERY_GRADIENT,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, G_STRIDE: tl.constexpr, intervals_b, lengths_b,
    scale, HEADS, HQ, LQ, LK, LQ_PAD,
    S: tl.constexpr,
):  # fmt: skip
    """dQ alone, added up in a fixed order: one program per block of queries, head and batch element."""
    STEP: tl.constexpr = S.block_n - S.chains
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = b * HQ + h
    row = block * S.block_m + tl.arange(0, S.block_m)
    exists, place = row < LQ, row.to(tl.int64)
    lo, hi, sees = load_intervals(INTERVALS + b * intervals_b, row, exists)
    K += b * k_b + h // S.group * k_h
    V += b * v_b + h // S.group * v_h
    if LENGTHS is not None:
        LENGTHS += b * lengths_b
    q = load_rows(Q + b * q_b + h * q_h, place, S.query_stride, sees, S.dim, S.dim_padded)
    d_out = load_rows(OUT_GRADIENT + b * g_b + h * g_h, place, G_STRIDE, sees, S.value_dim, S.value_dim_padded)
    reference, mean = tl.load(ROWS + head * LQ_PAD + row), tl.load(ROWS + (HEADS + head) * LQ_PAD + row)
    rest_of_reference = tl.load(ROWS + (6 * HEADS.to(tl.int64) + head) * LQ_PAD + row)
    gains = load_gain(GAIN)
    d_q = load_rows(SUM + head * LQ_PAD * S.dim, place, S.dim, exists, S.dim, S.dim_padded)

    limits = bounds(lo, hi, sees, LK)
    lo_min, lo_max, hi_min, hi_max = limits
    seen, nodes, of_row = (lo, hi, sees), (K, V, LENGTHS, LK), (reference, rest_of_reference, mean)
    before, full = full_tiles(lo_min, lo_max, hi_min, STEP)
    for i in tl.range(0, full, num_stages=S.stages):
        first = lo_min + (before + i) * STEP
        d_q = queries_tile(q, d_out, nodes, seen, limits, of_row, gains, first, scale, d_q, S, False)
    for i in tl.range(0, tl.cdiv(hi_max - 1 - lo_min, STEP) - full, num_stages=1):
        first = lo_min + tl.where(i < before, i, i + full) * STEP
        d_q = queries_tile(q, d_out, nodes, seen, limits, of_row, gains, first, scale, d_q, S, True)
    store_rows(QUERY_GRADIENT + head * LQ * S.dim, place, d_q * (scale * LN2 / gains[1]), exists, S.dim, S.dim_padded)


@triton.jit
def queries_tile(q, d_out, nodes, seen, limits, of_row, gains, first, scale, d_q, S: tl.constexpr, EDGE: tl.constexpr):
    """What a tile of nodes gives to a block of queries."""
    K, V, LENGTHS, LK = nodes
    lo, hi, _ = seen
    offset, _ = positions(S.block_n, S.chains)
    wanted = None
    if EDGE:
        wanted = wanted_nodes(first + offset, seen, limits)
    place = (first + offset).to(tl.int64) if S.wide else first + offset
    k = load_rows(K, place, S.key_stride, wanted, S.dim, S.dim_padded)
    v = load_rows(V, place, S.value_stride, wanted, S.value_dim, S.value_dim_padded)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    d_w = tl.dot(d_out, tl.trans(v), input_precision="ieee")
    _, d_s, _ = gradients_of_tile(s, d_w, LENGTHS, first, lo, hi, of_row, gains, scale, LK, S, EDGE, False)
    return tl.dot(d_s.to(k.dtype), k, d_q, input_precision="ieee")
