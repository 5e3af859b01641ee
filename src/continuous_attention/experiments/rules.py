"""Ways to weigh the nodes of a path that the time series experiments compare, at the same parameters and steps.

    exact         the integral itself
    fourth-order  the integral of nodes that were moved to fourth order
    trapezoid     softmax with log-weights (h_i + h_{i+1}) / 2
    gregory       the trapezoid with Gregory's corrections at both ends of every path (a step of no length ends one), of
                  fourth order on even grids
    rectangle     softmax with log-weights h_i, h_1 for the first node too
    softmax       softmax over the nodes, whatever the times
    gauss         softmax over two Gauss points on each segment with log-weights h_i / 2: twice the scores

Shape legend: B batch, H heads, Lq queries, L nodes, D head dim.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from continuous_attention.nn import ContinuousMultiheadAttention

RULES = ("exact", "fourth-order", "trapezoid", "gregory", "rectangle", "softmax", "gauss")

# What the trapezoid's first three and last three weights are multiplied with.
GREGORY = (3 / 4, 7 / 6, 23 / 24)
GAUSS = (0.5 - 0.75**0.5 / 3, 0.5 + 0.75**0.5 / 3)


def use_rule(model: nn.Module, rule: str) -> None:
    """Make every attention along a path follow the rule; the parameters are the same for all."""
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    for module in model.modules():
        if isinstance(module, ContinuousMultiheadAttention):
            if rule == "fourth-order":
                module.interpolation = "fourth_order"
            elif rule == "trapezoid":
                module.rule = "trapezoid"
            elif rule != "exact":
                # An attribute of the instance goes before the method.
                module.attend = partial(_attend, rule)


def _attend(
    rule: str, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, *, times: Tensor, **how: object
) -> Tensor:
    """`ContinuousMultiheadAttention.attend` by another rule, where all queries see all nodes."""
    partial_views = [name for name in ("is_causal", "window", "time_window") if how.get(name)]
    if partial_views:
        raise NotImplementedError(f"rule {rule!r} needs queries that see all nodes, got {', '.join(partial_views)}")
    if visible is None:
        visible = torch.ones(len(key), 1, 1, key.shape[2], dtype=torch.bool, device=key.device)
    present = visible[:, 0, 0]
    steps = (times.expand_as(present).diff(dim=-1) * (present[:, 1:] & present[:, :-1])).to(key.dtype)
    if rule == "gauss":
        key, value = (_between(z) for z in (key, value))
        weights = torch.cat([steps, steps], dim=-1) / 2
    elif rule == "softmax":
        weights = present.to(steps.dtype)
    elif rule == "rectangle":
        weights = torch.cat([steps[:, :1], steps], dim=-1)
    else:
        weights = gregory_weights(steps)
    return F.scaled_dot_product_attention(query, key, value, weights.log()[:, None, None])


def _between(z: Tensor) -> Tensor:
    """The first Gauss point of each segment, then the second one; (B, H, 2 (L − 1), D)."""
    return torch.cat([torch.lerp(z[:, :, :-1], z[:, :, 1:], s) for s in GAUSS], dim=2)


def gregory_weights(steps: Tensor) -> Tensor:
    """Node weights (B, L) for segments of lengths (B, L − 1); paths of fewer than 6 nodes have the trapezoid's."""
    before, after = F.pad(steps, (1, 0)), F.pad(steps, (0, 1))
    weights = (before + after) / 2
    node = torch.arange(weights.shape[1], device=steps.device).expand_as(weights)
    first = node.masked_fill(before > 0, 0).cummax(-1).values
    last = node.masked_fill(after > 0, len(node[0])).flip(-1).cummin(-1).values.flip(-1)
    for i, factor in enumerate(GREGORY):
        ends = ((node - first == i) | (last - node == i)) & (last - first + 1 >= 2 * len(GREGORY))
        weights = torch.where(ends, weights * factor, weights)
    return weights
