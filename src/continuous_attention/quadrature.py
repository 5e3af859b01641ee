"""The trapezoid and rectangle rules through torch's SDPA: an ordinary softmax over nodes with log-weights.

A quadrature gives each node a weight that depends on lengths only, so o = softmax(a + log weight) v and torch's fused
softmax kernels do the work. `reference.attention` defines the same rules, and is needed for lse, for gradients of
the lengths and for masks with gaps.

Shape legend: B batch, Hkv key/value heads, Lq queries, Lk nodes, D and Dv head dims.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from continuous_attention.intervals import covered_nodes, visible_nodes
from continuous_attention.reference import accumulation_dtype, full_precision


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Tensor,
    *,
    scale: float,
    lengths: Tensor | None,
    start_node: tuple[Tensor, Tensor] | None,
    start_length: float,
    end_length: float | Tensor,
    rule: str,
) -> Tensor:
    """The output of `reference.attention`, same arguments, with rule "trapezoid" or "rectangle"."""
    unseen = ~covered_nodes(intervals, key.shape[2])[:, None, :, None]
    key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
    visible = visible_nodes(intervals, key.shape[2])[:, None]
    empty = ~visible.any(-1, keepdim=True)
    query = query.masked_fill(empty, 0.0)

    if rule == "rectangle" and lengths is None and start_length == 1.0 and end_length == 0.0:
        out = F.scaled_dot_product_attention(query, key, value, visible | empty, scale=scale, enable_gqa=True)
        return out.masked_fill(empty, 0.0)

    weight = _node_weights(visible, lengths, start_node is not None, start_length, end_length, rule)
    # A log-weight in half precision would lose digits that the lengths have.
    dtype = accumulation_dtype(query.dtype)
    q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
    if start_node is not None:
        k0, v0 = (node.to(dtype).expand(len(key), -1, -1).unsqueeze(2) for node in start_node)
        k, v = torch.cat([k0, k], dim=2), torch.cat([v0, v], dim=2)
        weight = torch.cat([torch.full_like(weight[..., :1], start_length / 2), weight], dim=-1)
    bias = weight.log().masked_fill(empty, 0.0).to(dtype)
    with full_precision(query.device):
        out = F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=True)
    return out.masked_fill(empty, 0.0).to(query.dtype)


def _node_weights(
    visible: Tensor,
    lengths: Tensor | None,
    has_start_node: bool,
    start_length: float,
    end_length: float | Tensor,
    rule: str,
) -> Tensor:
    """The weight of each node, (B or 1, 1, Lq or 1, Lk) in float64; all on the last one if the domain has no length."""
    nodes = torch.arange(visible.shape[-1], device=visible.device)
    at_first = visible & (nodes == visible.int().argmax(-1, keepdim=True))
    at_last = visible & (nodes == (nodes * visible).amax(-1, keepdim=True))
    length = torch.ones_like(nodes)[None] if lengths is None else lengths
    length = length.double()[:, None, None, 1:] * (visible[..., 1:] & visible[..., :-1])
    before, after = F.pad(length, (1, 0)), F.pad(length, (0, 1))
    # Half of the segment from a start node, or all of a piece that is held constant.
    share = 0.5 if has_start_node else 1.0
    end = end_length.unsqueeze(-1).double() if isinstance(end_length, Tensor) else end_length
    held = at_first.double() * (share * start_length) + at_last.double() * end
    weight = (before if rule == "rectangle" else (before + after) / 2) + held
    return torch.where(weight.sum(-1, keepdim=True) == 0, at_last.double(), weight)
