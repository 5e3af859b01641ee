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
    with full_precision(query.device):
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
        no_length = total == 0
        total = total.masked_fill(no_length, 1.0)
        if start_node is None:
            out = weight @ v
        else:
            v0 = start_node[1].to(dtype).repeat_interleave(group, dim=0).unsqueeze(-2)
            weight_start = torch.where(at_start, weight, 0.0).sum(-1, keepdim=True)
            out = torch.where(at_start, 0.0, weight) @ v + weight_start * v0
        # The limit of a domain whose length goes to 0; column 0 holds the 0 of an empty one.
        value_last = v.gather(2, last.expand(*out.shape[:3], v.shape[3]))
        out = torch.where(no_length, value_last, out / total)
        lse = torch.where(no_length, -math.inf, peak + total.log()).squeeze(-1)
        return out.to(query.dtype), lse
