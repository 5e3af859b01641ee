"""The definition of continuous softmax attention in plain torch: the specification that back ends are held to.

It stores the scores (memory grows with Lq · Lk) and is differentiable as often as you like. What the words causal,
window, boundary, document and time mean is resolved before, in functional.py: here, and at every back end, arrive
an interval of visible nodes per query, the lengths of the segments between the nodes, and what lies before the first
and after the last visible node. docs/math.md derives every line.

Shape legend: B batch, Hq query heads, Hkv key/value heads, Lq queries, Lk nodes, D and Dv head dims. Inside, node i
is column i + 1 of C = Lk + 1 columns: the start node stands in the column before the first visible node.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from continuous_attention.intervals import visible_nodes
from continuous_attention.segment import shares

BASE = math.e  # of the references that `integrate` returns


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, weights and lse: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Keep autocast away: under it a product of float32 tensors is computed in half precision."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Tensor,
    *,
    scale: float,
    lengths: Tensor | None = None,
    start_node: tuple[Tensor, Tensor] | None = None,
    start_length: float = 0.0,
    end_length: float | Tensor = 0.0,
    mask: Tensor | None = None,
    rule: str = "exact",
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Integrate the values over each query's stretch of path: o = ∫ e^{a(s)} v(s) ds / ∫ e^{a(s)} ds.

    Args:
        query: (B, Hq, Lq, D).
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        intervals: (B or 1, Lq or 1, 2), the nodes [lo, hi) that a query sees.
        scale: factor of the scores a_i = scale · q·k_i.
        lengths: (B or 1, Lk), the length of the segment that ends at each node; all 1 where None.
        start_node: k0 (Hkv, D) and v0 (Hkv, Dv), joined to the first visible node by a segment of `start_length`.
        start_length: without a start node, the path is held constant for this long before the first visible node.
        end_length: number or (B or 1, Hq or 1, Lq or 1), how long the path is held constant after the last one.
        mask: boolean (B or 1, Hq or 1, Lq or 1, Lk), True = visible, on top of the intervals; may have gaps.
        rule: "exact", "trapezoid", "rectangle" or "taylor".
        softcap: c, where the nodes have the score c·tanh(a_i/c).

    Returns:
        out (B, Hq, Lq, Dv) in the query's dtype, and lse (B, Hq, Lq) = log ∫ e^{a(s)} ds in float32 (float64 for
        float64). Where the domain is empty out is 0, where it has no length out is the last visible node's value,
        and lse is −inf in both.
    """
    how = {"lengths": lengths, "start_node": start_node, "start_length": start_length, "end_length": end_length}
    how |= {"mask": mask, "rule": rule, "softcap": softcap, "scale": scale}
    out, reference, total = integrate(query, key, value, intervals, **how)
    with full_precision(query.device):
        lse = torch.where(total == 0, -math.inf, reference + total.masked_fill(total == 0, 1.0).log())
        return out.to(query.dtype), lse


def integrate(
    query: Tensor, key: Tensor, value: Tensor, intervals: Tensor, **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention` with the numbers that let adjacent stretches be merged: lse = reference · ln BASE + log total.

    Args:
        query: as all that follow, what `attention` is given under this name.
        key: of the nodes.
        value: of the nodes.
        intervals: of the queries.
        **how: its other arguments.

    Returns:
        out (B, Hq, Lq, Dv), reference and total (B, Hq, Lq), in float32 (float64 for float64). Where the domain has no
        length total is 0.
    """
    with full_precision(query.device):
        sums, total, reference, value_last = _sums(query, key, value, intervals, None, **how)
        no_length = total == 0
        out = torch.where(no_length, value_last, sums / total.masked_fill(no_length, 1.0))
        return out, reference.squeeze(-1), total.squeeze(-1)


def differentiate(
    out_gradient: Tensor,
    lse_gradient: Tensor,
    out: Tensor,
    rest: Tensor | None,
    reference: Tensor,
    total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Tensor,
    *,
    wanted: tuple[bool, bool, bool],
    lengths: Tensor | None = None,
    start_node: tuple[Tensor, Tensor] | None = None,
    end_length: float | Tensor = 0.0,
    **how: Any,
) -> tuple[Tensor | None, ...]:
    """The gradients that one stretch of a path adds to those of the whole domain.

    With the whole domain's Z = BASE^reference · total and o = out, and the stretch's weights w_i, they are those of

        (1/Z) Σ_i w_i (dO·v_i − dO·o + dlse)

    where o and Z stand still. Where the whole domain has no length, dO goes to the stretch's last visible value.

    Args:
        out_gradient: dO (B, Hq, Lq, Dv).
        lse_gradient: dlse (B, Hq, Lq).
        out: of the whole domain, in the query's dtype.
        rest: what rounding took from it; None for nothing.
        reference: of the whole domain, as from `integrate`; finite.
        total: of the whole domain.
        query: as all that follow, what `integrate` is given for this stretch.
        key: of its nodes.
        value: of its nodes.
        intervals: of its queries.
        wanted: whether the gradients of the start node, the lengths and the end lengths are.
        lengths: of its segments.
        start_node: before the first visible node.
        end_length: held after the last one.
        **how: the other arguments.

    Returns:
        Gradients of query, key, value, lengths, start key, start value and end_length; None for those not wanted.
    """
    with full_precision(query.device), torch.enable_grad():
        dtype = accumulation_dtype(query.dtype)
        of_start, of_lengths, of_ends = wanted
        start = (None, None) if start_node is None else start_node
        end = end_length if isinstance(end_length, Tensor) else None
        given = [(True, query), (True, key), (True, value), (of_lengths, lengths)]
        given += [(of_start, start[0]), (of_start, start[1]), (of_ends, end)]
        leaves: list[Any] = [None if x is None else x.detach().to(dtype).requires_grad_(needed) for needed, x in given]
        q, k, v, how["lengths"], k0, v0, end = leaves
        how |= {"start_node": None if k0 is None else (k0, v0), "end_length": end_length if end is None else end}
        sums, mass, _, last = _sums(q, k, v, intervals, reference.unsqueeze(-1), **how)
        out = out.to(dtype) if rest is None else out.to(dtype) + rest
        out_gradient = out_gradient.to(dtype)
        no_length = total == 0
        gain = lse_gradient - (out_gradient * out).sum(-1)
        change = ((out_gradient * sums).sum(-1) + gain * mass.squeeze(-1)) / total.masked_fill(no_length, 1.0)
        change = torch.where(no_length, (out_gradient * last).sum(-1), change).sum()
        asked = [x for x in leaves if x is not None and x.requires_grad]
        found = dict(zip(map(id, asked), torch.autograd.grad(change, asked, materialize_grads=True), strict=True))
        return tuple(found.get(id(x)) for x in leaves)


def _sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Tensor,
    peak: Tensor | None,
    *,
    scale: float,
    lengths: Tensor | None = None,
    start_node: tuple[Tensor, Tensor] | None = None,
    start_length: float = 0.0,
    end_length: float | Tensor = 0.0,
    mask: Tensor | None = None,
    rule: str = "exact",
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ w_i v_i and Σ w_i relative to e^peak, the peak (the largest score where None), and the last visible value."""
    dtype = accumulation_dtype(query.dtype)
    group = query.shape[1] // key.shape[1]
    visible = visible_nodes(intervals, key.shape[2])[:, None]
    if mask is not None:
        visible = visible & mask

    # Nodes that no query sees, and queries that see no node, may hold anything, NaN included.
    unseen = ~visible.any(-2).unsqueeze(-1)
    q = query.to(dtype).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    k = F.pad(key.to(dtype).repeat_interleave(group, dim=1).masked_fill(unseen, 0.0), (0, 0, 1, 0))
    v = F.pad(value.to(dtype).repeat_interleave(group, dim=1).masked_fill(unseen, 0.0), (0, 0, 1, 0))
    score = q @ k.mT * scale

    # The domain: which columns are visible, how long each segment is, how long the path is held at its ends.
    visible = F.pad(visible, (1, 0))
    columns = torch.arange(visible.shape[-1], device=query.device)
    first = visible.int().argmax(-1, keepdim=True)
    last = (columns * visible).amax(-1, keepdim=True)
    at_first, at_last = visible & (columns == first), visible & (columns == last)
    at_start = F.pad(at_first[..., 1:], (0, 1))
    length = torch.ones(1, key.shape[2], dtype=dtype, device=query.device) if lengths is None else lengths
    length = length.to(dtype)[:, None, None]
    if isinstance(end_length, Tensor):
        end_length = end_length.to(dtype).unsqueeze(-1)
    hold = at_last.to(dtype) * end_length
    if start_node is None:
        hold = hold + at_first.to(dtype) * start_length
    else:
        k0 = start_node[0].to(dtype).repeat_interleave(group, dim=0).unsqueeze(-2)
        visible = visible | at_start
        score = torch.where(at_start, q @ k0.mT * scale, score)
        length = torch.where(at_start[..., :-1], start_length, length)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    # The rectangle rule knows no segments: each node has the step before it, seen or not.
    counts = visible[..., 1:] & ~at_first[..., 1:] if rule == "rectangle" else visible[..., 1:] & visible[..., :-1]
    length = torch.where(counts, length, 0.0)

    # Node weights w_i, relative to e^peak.
    before, after = F.pad(length, (1, 0)), F.pad(length, (0, 1))
    extent = before + hold if rule == "rectangle" else (before + after) / 2 + hold
    score = torch.where(visible, score, 0.0)
    if rule == "taylor":
        rise = length * score.diff(dim=-1)
        bend = F.pad(rise, (0, 1)) - F.pad(rise, (1, 0))
        score = score + bend / torch.where(extent > 0, 6 * extent, 1.0)
    if peak is None:
        peak = torch.where(extent > 0, score.detach(), -math.inf).amax(-1, keepdim=True)
        peak = peak.masked_fill(peak == -math.inf, 0.0)
    # A node without extent has no weight and doesn't set the peak, so its score may lie above; keep it finite.
    score = (score - peak).clamp(max=math.log(torch.finfo(dtype).max) / 2)
    if rule == "exact":
        left, right = shares(score[..., :-1], score[..., 1:])
        weight = F.pad(length * right, (1, 0)) + F.pad(length * left, (0, 1))
        if start_node is None or isinstance(end_length, Tensor) or end_length > 0:
            weight = weight + hold * score.exp()
    else:
        weight = extent * score.exp()

    total = weight.sum(-1, keepdim=True)
    if start_node is None:
        sums = weight @ v
    else:
        v0 = start_node[1].to(dtype).repeat_interleave(group, dim=0).unsqueeze(-2)
        weight_start = torch.where(at_start, weight, 0.0).sum(-1, keepdim=True)
        sums = torch.where(at_start, 0.0, weight) @ v + weight_start * v0
    # The limit of a domain whose length goes to 0; column 0 holds the 0 of an empty one.
    value_last = v.gather(2, last.expand(*sums.shape[:3], v.shape[3]))
    return sums, total, peak, value_last
