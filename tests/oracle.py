"""What continuous attention should give, straight from the integral: slow, in float64, with no code of the package.

`attention` and `gradients` take the public function's arguments. For every query they list the stretch of path that it
sees, node by node in plain Python, and hand each segment's integrand to scipy's adaptive quadrature. The gradients are
the integral's own, differentiated under the integral sign: with g(s) = dO·v(s) − dO·o + dlse and the hat function φ_i
of node i, dL/da_i = ∫ e^{a(s)} g(s) φ_i(s) ds / Z, and dL/dh = ∫ e^{a(s)} g(s) ds / Z over the segment of length h.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from scipy.integrate import quad
from torch import Tensor

START = -1  # the number of the start node


@dataclass(frozen=True)
class Stretch:
    """The stretch of path that one query integrates over."""

    nodes: list[int]
    scores: np.ndarray  # of each node
    keys: np.ndarray  # (nodes, D)
    values: np.ndarray  # (nodes, Dv)
    lengths: np.ndarray  # of the segment between each node and the next, 0 where the path is cut
    held: np.ndarray  # how long the path stands still on each node

    def extents(self) -> np.ndarray:
        """The trapezoid weights: half the length on either side of each node, and what is held."""
        return (np.append(0, self.lengths) + np.append(self.lengths, 0)) / 2 + self.held

    def peak(self) -> float:
        """The largest score among the nodes that have length beside them."""
        return max((a for a, extent in zip(self.scores, self.extents(), strict=True) if extent > 0), default=0.0)


def attention(query: Tensor, key: Tensor, value: Tensor, *, rule: str = "exact", **how: Any) -> tuple[Tensor, Tensor]:
    """The output and lse in float64, of the public function's arguments."""
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    lse = torch.full(query.shape[:3], -math.inf, dtype=torch.float64)
    for place, stretch in stretches(query, key, value, rule=rule, **how):
        weights = node_weights(stretch, rule)
        total = weights.sum()
        o = weights @ stretch.values / total if total > 0 else stretch.values[-1]
        out[place] = torch.from_numpy(o)
        lse[place] = stretch.peak() + math.log(total) if total > 0 else -math.inf
    return out, lse


def gradients(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, grad_lse: Tensor, **how: Any
) -> list[Tensor]:
    """The gradients of Σ grad_out · out + Σ grad_lse · lse by query, key, value and, if given, k0, v0, times (Lk,)."""
    start = how["boundary"] if isinstance(how.get("boundary"), tuple) else ()
    times = () if how.get("times") is None else (how["times"],)
    grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (query, key, value, *start, *times)]
    dq, dk, dv, *others = (x.numpy() for x in grads)
    scale = 1 / math.sqrt(query.shape[-1]) if how.get("scale") is None else how["scale"]
    group = query.shape[1] // key.shape[1]
    for (b, h, j), stretch in stretches(query, key, value, **how):
        g, q = h // group, query[b, h, j].detach().double().numpy()
        d_out, d_lse = grad_out[b, h, j].double().numpy(), float(grad_lse[b, h, j])
        weights = node_weights(stretch, "exact")
        total = weights.sum()
        if total == 0:
            dv[b, g, stretch.nodes[-1]] += d_out
            continue
        excess = (stretch.values - weights @ stretch.values / total) @ d_out + d_lse

        def along(i: int, s: float, g: np.ndarray = excess) -> float:
            return (1 - s) * g[i] + s * g[i + 1]

        d_scores = (_integrate(stretch, along) + excess * _stood(stretch)) * scale / total
        dq[b, h, j] = d_scores @ stretch.keys
        for node, d_score, weight in zip(stretch.nodes, d_scores, weights / total, strict=True):
            if node != START:
                dk[b, g, node] += d_score * q
                dv[b, g, node] += weight * d_out
            elif start:
                others[0][g] += d_score * q
                others[1][g] += weight * d_out
        for i, (before, after) in enumerate(pairwise(stretch.nodes) if times else ()):
            if before != START and after == before + 1:
                d_length = sum(_shares(stretch, i, along)) / total
                others[-1][[before, after]] += [-d_length, d_length]
    return grads


def node_weights(stretch: Stretch, rule: str) -> np.ndarray:
    """The weight of each node, relative to e^peak."""
    extents, scores = stretch.extents(), stretch.scores - stretch.peak()
    if rule == "exact":
        return _integrate(stretch, lambda i, s: 1.0) + _stood(stretch)
    if rule == "rectangle":
        extents = np.append(0, stretch.lengths) + stretch.held
    with_length = extents > 0
    logs = np.log(extents[with_length]) + scores[with_length]
    if rule == "taylor":
        # ∫ e^{δs} (1−s) ds = ½ + δ/6 + … for the node with slope δ ahead of it, ½ − δ/6 for the other one.
        first_order = stretch.lengths * np.diff(scores) / 6
        first_order = np.append(first_order, 0) - np.append(0, first_order)
        logs += first_order[with_length] / extents[with_length]
    weights = np.zeros_like(extents)
    weights[with_length] = np.exp(logs)
    return weights


def _stood(stretch: Stretch) -> np.ndarray:
    """The mass where the path stands still, on each node."""
    return np.array(
        [
            held * math.exp(a - stretch.peak()) if held > 0 else 0.0
            for a, held in zip(stretch.scores, stretch.held, strict=True)
        ]
    )


def _integrate(stretch: Stretch, factor: Callable[[int, float], float]) -> np.ndarray:
    """∫ e^{a(s) − peak} factor(i, s) φ(s) over the segments i, for the hat function φ of each node."""
    total = np.zeros(len(stretch.nodes))
    for i, length in enumerate(stretch.lengths):
        if length > 0:
            total[i : i + 2] += length * np.array(_shares(stretch, i, factor))
    return total


def _shares(stretch: Stretch, i: int, factor: Callable[[int, float], float]) -> tuple[float, float]:
    """∫ e^{a(s) − peak} factor(i, s) (1 − s) ds and the same with s, over segment i as if its length were 1."""
    a0, a1 = stretch.scores[i : i + 2] - stretch.peak()

    def density(s: float) -> float:
        return math.exp((1 - s) * a0 + s * a1) * factor(i, s)

    return _quad(lambda s: density(s) * (1 - s)), _quad(lambda s: density(s) * s)


def _quad(function: Callable[[float], float]) -> float:
    return quad(function, 0.0, 1.0, epsabs=1e-14, epsrel=1e-12, limit=200)[0]


def stretches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    boundary: str | tuple[Tensor, Tensor] = "zero",
    times: Tensor | None = None,
    query_times: Tensor | None = None,
    start_length: float = 1.0,
    window: int | tuple[int, int] | None = None,
    time_window: float | None = None,
    intervals: Tensor | None = None,
    rule: str = "exact",
) -> Iterator[tuple[tuple[int, int, int], Stretch]]:
    """The stretch of every query (b, h, j) that sees anything."""
    (batch, heads, lq, dim), lk = query.shape, key.shape[2]
    group = heads // key.shape[1]
    assert group == 1 or enable_gqa
    q, k, v = (x.detach().double().numpy() for x in (query, key, value))
    scale = 1 / math.sqrt(dim) if scale is None else scale
    mask = (
        np.ones((batch, heads, lq, lk), bool) if attn_mask is None else attn_mask.expand(batch, heads, lq, lk).numpy()
    )
    grid = np.arange(lk) if times is None else times.detach().double().numpy()
    grid = np.broadcast_to(grid, (batch, lk))
    now = None if query_times is None else np.broadcast_to(query_times.detach().double().numpy(), (batch, lq))
    ranges = None if intervals is None else intervals.expand(batch, lq, 2).numpy()
    for b, h, j in product(range(batch), range(heads), range(lq)):
        tau = grid[b]
        inside = range(lk) if ranges is None else [i for i in range(lk) if ranges[b, j, 0] <= i < ranges[b, j, 1]]
        # The node that the query stands on; with a time of its own, one from the first to the last that any head sees.
        position = lk - lq + j
        by_any_head = [i for i in inside if mask[b, :, j, i].any()]
        if now is not None and by_any_head:
            before = [i for i in range(by_any_head[0], by_any_head[-1] + 1) if tau[i] <= now[b, j]]
            position = max(before, default=by_any_head[0] - 1)
        seen = [i for i in inside if mask[b, h, j, i]]
        if is_causal:
            seen = [i for i in seen if i <= position]
        if window is not None:
            left, right = (window - 1, 0) if isinstance(window, int) else window
            seen = [i for i in seen if (left < 0 or i >= position - left) and (right < 0 or i <= position + right)]
        if time_window is not None:
            seen = [i for i in seen if tau[i] >= (tau[position] if now is None else now[b, j]) - time_window]
        if not seen:
            continue

        nodes, keys, values = seen, k[b, h // group, seen], v[b, h // group, seen]
        # A segment counts if both its nodes are visible; the rectangle rule gives each node the step before it.
        counts = [y == x + 1 or rule == "rectangle" for x, y in pairwise(seen)]
        lengths = np.array(
            [tau[y] - tau[y - 1] if y_counts else 0 for y, y_counts in zip(seen[1:], counts, strict=True)]
        )
        held = np.zeros(len(seen))
        if rule == "rectangle" or boundary == "repeat":
            held[0] += start_length
        elif boundary == "half":
            held[0] += start_length / 2
            held[-1] += start_length / 2
        elif boundary != "none":
            start = np.zeros(dim), np.zeros(value.shape[3])
            if not isinstance(boundary, str):
                start = tuple(x[h // group].detach().double().numpy() for x in boundary)
            nodes, keys, values = [START, *nodes], np.vstack([start[0], keys]), np.vstack([start[1], values])
            lengths, held = np.append(start_length, lengths), np.append(0, held)
        if is_causal and times is not None and now is not None:
            held[-1] += now[b, j] - tau[seen[-1]]
        yield (b, h, j), Stretch(nodes, scale * keys @ q[b, h, j], keys, values, lengths, held)


def random_inputs(
    batch: int = 2,
    heads: int = 4,
    key_heads: int = 2,
    lq: int = 4,
    lk: int = 4,
    dim: int = 3,
    value_dim: int = 2,
    *,
    dtype: torch.dtype = torch.float64,
    steepness: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value; the scores have a standard deviation of `steepness` at the default scale."""
    query = torch.randn(batch, heads, lq, dim, dtype=torch.float64) * steepness
    key = torch.randn(batch, key_heads, lk, dim, dtype=torch.float64)
    value = torch.randn(batch, key_heads, lk, value_dim, dtype=torch.float64)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def boundary_of(name: str, key: Tensor, value: Tensor) -> str | tuple[Tensor, Tensor]:
    """The boundary of that name; "node" is a random start node (k0, v0)."""
    if name != "node":
        return name
    shape = key.shape[1], key.shape[3], value.shape[3]
    return torch.randn(shape[0], shape[1]).to(key.dtype), torch.randn(shape[0], shape[2]).to(value.dtype)


BOUNDARY_NAMES = ("zero", "node", "repeat", "half", "none")
