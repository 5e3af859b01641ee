"""Ways to weigh the nodes of a path that the time series experiments compare, at the same parameters and steps.

    exact         the integral itself
    fourth-order  the integral of nodes that were moved to fourth order
    trapezoid     softmax with log-weights (h_i + h_{i+1}) / 2
    gregory       the trapezoid with Gregory's end corrections, of fourth order on even grids
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
    if visible is None:
        visible = torch.ones(len(key), 1, 1, key.shape[2], dtype=torch.bool, device=key.device)
    present = visible[:, 0, 0]
    steps = (times.expand_as(present).diff(dim=-1) * (present[:, 1:] & present[:, :-1])).to(key.dtype)
    if rule == "gauss":
        key, value = (_between(z) for z in (key, value))
        weights = torch.cat([steps, steps], dim=-1) / 2
    else:
        weights = node_weights(rule, steps, present)
    return F.scaled_dot_product_attention(query, key, value, weights.log()[:, None, None])


def _between(z: Tensor) -> Tensor:
    """The first Gauss point of each segment, then the second one; (B, H, 2 (L − 1), D)."""
    return torch.cat([torch.lerp(z[:, :, :-1], z[:, :, 1:], s) for s in GAUSS], dim=2)


def node_weights(rule: str, steps: Tensor, present: Tensor) -> Tensor:
    """The weights (B, L) of "gregory", "rectangle" and "softmax", 0 for padding.

    Args:
        rule: its name.
        steps: (B, L − 1), lengths of the segments.
        present: boolean (B, L), the nodes: the first ones of each row.
    """
    if rule == "softmax":
        return present.to(steps.dtype)
    before, after = F.pad(steps, (1, 0)), F.pad(steps, (0, 1))
    if rule == "rectangle":
        return torch.cat([steps[:, :1], steps], dim=-1)
    weights = (before + after) / 2
    count = present.sum(-1, keepdim=True)
    place = torch.arange(present.shape[1], device=present.device)
    for i, factor in enumerate(GREGORY):
        ends = (place == i) | (place == count - 1 - i)
        weights = torch.where(ends & (count >= 2 * len(GREGORY)), weights * factor, weights)
    return weights
