"""The nodes of a path before a query integrates over it: a fourth-order correction, and fewer nodes.

Shape legend: B batch, Hkv key/value heads, Lk nodes, D and Dv head dims.
"""

from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from continuous_attention import intervals as iv
from continuous_attention.checks import (
    check_integer,
    check_number,
    check_order,
    check_qkv,
    check_shape,
    check_tensor,
    check_times,
    is_integer,
)
from continuous_attention.reference import accumulation_dtype

# ---- Fourth order


def correct(nodes: Tensor, lengths: Tensor | None, joined: Tensor) -> Tensor:
    """Move the nodes so that the straight lines between them integrate a smooth path to fourth order.

        z_i ← z_i − c_i z''_i        c_i = (h_i³ + h_{i+1}³) / (12 (h_i + h_{i+1}))
        z''_i = 2 [(z_{i+1} − z_i)/h_{i+1} − (z_i − z_{i−1})/h_i] / (h_i + h_{i+1})

    At the two ends of a path c = h²/12 and z'' is that of the nearest inner node. A path of one or two nodes has
    none and stays as it is. A segment without length (or with so little beside its neighbour that rounding hides it)
    is a border between two paths.

    Args:
        nodes: (B, Hkv, Lk, D), keys or values.
        lengths: (B or 1, Lk), of the segment that ends at each node; all equal where None.
        joined: boolean (B or 1, Lk), whether a node is joined to the one before it.

    Returns:
        The nodes moved, in their own dtype; nodes that belong to no path are returned as they are.
    """
    if nodes.shape[2] < 3:
        return nodes
    z = nodes.to(accumulation_dtype(nodes.dtype))
    h = torch.ones_like(joined, dtype=z.dtype) if lengths is None else lengths
    neighbour = torch.maximum(F.pad(h[:, 1:], (0, 1)), F.pad(h[:, :-1], (1, 0)))
    joined = joined & (h > torch.finfo(z.dtype).eps * neighbour)
    joined = torch.cat([torch.zeros_like(joined[:, :1]), joined[:, 1:]], dim=-1)
    after = F.pad(joined[:, 1:], (0, 1))

    # The inner nodes 1 … Lk − 2; share is h_i / (h_i + h_{i+1}), so that no unit of time matters.
    inner = (joined & after)[:, 1:-1]
    span = torch.where(inner, h[:, 1:-1] + h[:, 2:], 1.0)
    share_before = torch.where(inner, h[:, 1:-1] / span, 0.5).to(z.dtype)
    share_after = torch.where(inner, h[:, 2:] / span, 0.5).to(z.dtype)
    # What belongs to no path may be NaN, and would reach the gradient of the lengths as 0 · NaN.
    rise = z.masked_fill(~_per_row(joined | after), 0.0).diff(dim=2)
    bend = rise[:, :, 1:] / _per_row(share_after) - rise[:, :, :-1] / _per_row(share_before)
    bend = torch.where(_per_row(inner), bend / 6, 0.0)

    within = bend * _per_row(share_before**3 + share_after**3)
    at_left_end = bend * _per_row(share_before**2 * ~joined[:, :-2])
    at_right_end = bend * _per_row(share_after**2 * ~after[:, 2:])
    rows = (0, 0)
    shift = F.pad(within, (*rows, 1, 1)) + F.pad(at_left_end, (*rows, 0, 2)) + F.pad(at_right_end, (*rows, 2, 0))
    return torch.where(_per_row(joined | after), z - shift, z).to(nodes.dtype)


def _per_row(x: Tensor) -> Tensor:
    """(B or 1, L) to (B or 1, 1, L, 1)."""
    return x[:, None, :, None]


# ---- Fewer nodes


class Path(NamedTuple):
    """Nodes in a padded batch: `continuous_attention(q, path.key, path.value, path.mask, times=path.times)`."""

    key: Tensor
    """(B, Hkv, L, D)"""
    value: Tensor
    """(B, Hkv, L, Dv)"""
    times: Tensor
    """(B, L)"""
    present: Tensor
    """Boolean (B, L): these are nodes, the others padding."""

    @property
    def mask(self) -> Tensor:
        """The nodes as an attn_mask, (B, 1, 1, L)."""
        return self.present[:, None, None]

    @property
    def node_count(self) -> Tensor:
        """The number of nodes, (B,)."""
        return self.present.sum(-1)


def simplify(
    key: Tensor,
    value: Tensor,
    times: Tensor | None,
    tolerance: float | tuple[float, float],
    *,
    present: Tensor | None = None,
) -> Path:
    """Drop the nodes that lie within `tolerance` of the straight line between the nodes that stay.

        |k_i − k(τ_i)| ≤ tolerance  and  |v_i − v(τ_i)| ≤ tolerance        in every head, for every dropped node i

    where k(τ), v(τ) are the path through the nodes that stay. The first and the last node stay. What follows is about
    interpolation="linear". Without nodes exactly on a line every output is as it was, since the times say how long the
    lines are. Otherwise, for a query that sees the whole path, each score moves by at most ε = |scale| · |q| ·
    tolerance, and the output by at most tolerance + (e^{2ε} − 1) · (the diameter of the values). The farthest node
    beyond the tolerance is put back until there is none (the method of Ramer, Douglas and Peucker, in time instead of
    space), so the result isn't always the smallest one.

    Args:
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        times: (Lk,) or (B, Lk), float32 or float64, non-decreasing; 0, 1, 2, … where None.
        tolerance: largest distance (Euclidean, per head), at least 0; or one for the keys and one for the values.
        present: boolean (B, Lk), True = node; one run in each batch element, and all of them where None.

    Returns:
        The nodes that stay, at the beginning of each row, padded to the longest row with zeros and the last time;
        `path.node_count` says how many there are. Gradients flow to what stayed.

    Raises:
        ValueError, TypeError: a shape, type or meaning is wrong, as in `continuous_attention`.

    A node that isn't finite stays, and so do its neighbours. With query times or causality, queries that stand
    inside the path see it held from an earlier node than before: the bound is for queries that see it whole.
    """
    tolerances = _check_tolerance(tolerance)
    _check_key_value(key, value)
    times, present = _check_nodes(key, times, present)
    kept = _kept(key, value, times, present, tolerances)
    longest = int(kept.sum(-1).max()) if len(kept) else 0
    order = (~kept).to(torch.int8).argsort(dim=-1, stable=True)[:, :longest]
    return _gather(key, value, times, kept, order)


def _check_tolerance(tolerance: Any) -> tuple[float, float]:
    if isinstance(tolerance, Real) and not isinstance(tolerance, bool):
        tolerance = (tolerance, tolerance)
    if not isinstance(tolerance, tuple) or len(tolerance) != 2:
        raise TypeError(f"tolerance must be a number or a pair of numbers (key, value), got {tolerance!r}")
    of_key, of_value = (check_number("tolerance", x) for x in tolerance)
    if min(of_key, of_value) < 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    return of_key, of_value


def _check_key_value(key: Tensor, value: Tensor) -> None:
    check_qkv(key, key, value, ("key", "key", "value"), "B, heads, length, head dim")
    if key.shape[1] == 0:
        raise ValueError(f"key must have at least one head, got shape {tuple(key.shape)}")


def _check_nodes(key: Tensor, times: Tensor | None, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """Times and present nodes, both (B, Lk), of keys and values that were checked."""
    batch, length = len(key), key.shape[2]
    times = check_times("times", times, batch, length, key.device)
    if times is None:
        times = torch.arange(length, device=key.device, dtype=torch.float64)[None]
    times = times.expand(batch, -1)
    if present is None:
        present = torch.ones(batch, length, dtype=torch.bool, device=key.device)
    check_tensor("present", present, (torch.bool,), key.device)
    check_shape("present", present, [(batch, length)], "(B, Lk)")
    runs, contiguous = iv.of_mask(present)
    if not contiguous:
        raise ValueError("present must be one run of nodes in each batch element, got one with gaps")
    check_order(times, runs.unsqueeze(1))
    return times, present


@torch.no_grad()
def _kept(key: Tensor, value: Tensor, times: Tensor, present: Tensor, tolerances: tuple[float, float]) -> Tensor:
    """Which nodes stay, boolean (B, Lk)."""
    nodes = torch.arange(key.shape[2], device=key.device).expand_as(present)
    times = times.double()
    finite = torch.stack([z.isfinite().all(-1).all(1) for z in (key, value)]).all(0)
    # The ends of the run stay, and what isn't finite, with both its neighbours.
    inside = F.pad(present & finite, (1, 1))
    kept = present & ~(inside[:, 1:-1] & inside[:, :-2] & inside[:, 2:])
    while True:
        before = torch.where(kept, nodes, 0).cummax(-1).values
        after = torch.where(kept, nodes, key.shape[2] - 1).flip(-1).cummin(-1).values.flip(-1)
        open_ = present & ~kept
        start = times.gather(-1, before)
        span = times.gather(-1, after) - start
        share = torch.where(open_ & (span > 0), (times - start) / span, 0.0)
        excess = torch.zeros_like(times, dtype=torch.float64)
        for z, tolerance in zip((key, value), tolerances, strict=True):
            # No norm lies between 0 and 1e-163, whose square is 0; a smaller divisor makes infinities of distances.
            excess = excess.maximum(_distance(z, before, after, share) / max(tolerance, 1e-163))
        # Between nodes at one time there is no path; what overflows stays.
        excess = excess.nan_to_num(nan=torch.inf).masked_fill(~open_ | (span == 0), 0.0)
        if not (excess > 1).any():
            return kept
        farthest = torch.zeros_like(excess).scatter_reduce(-1, before, excess, "amax").gather(-1, before)
        candidate = (excess > 1) & (excess == farthest)
        first = torch.full_like(nodes, key.shape[2]).scatter_reduce(
            -1, before, nodes.masked_fill(~candidate, key.shape[2]), "amin"
        )
        kept = kept | (candidate & (nodes == first.gather(-1, before)))


def _distance(z: Tensor, before: Tensor, after: Tensor, share: Tensor) -> Tensor:
    """How far each node is from the line between two others, the largest over the heads; (B, Lk), float64."""
    z = z.double()
    start, end = (z.gather(2, _per_row(index).expand_as(z)) for index in (before, after))
    return (z - torch.lerp(start, end, _per_row(share).double())).norm(dim=-1).amax(1)


def _gather(key: Tensor, value: Tensor, times: Tensor, kept: Tensor, order: Tensor) -> Path:
    """The nodes in this order (B, L); those that aren't kept become padding."""
    present = kept.gather(-1, order)
    key, value = (
        z.gather(2, _per_row(order).expand(*z.shape[:2], -1, z.shape[3])).masked_fill(~_per_row(present), 0.0)
        for z in (key, value)
    )
    times = times.gather(-1, order)
    last = times.masked_fill(~present, -torch.inf).amax(-1, keepdim=True) if times.shape[-1] else times
    return Path(key, value, torch.where(present, times, last.nan_to_num(neginf=0.0)), present)


class ContinuousCache:
    """Keys and values of a stream that is decoded step by step, thinned out at a controlled error as they grow old.

    The newest nodes stay as they came. An update that finds 2 · `recent` of them or more first simplifies all but the
    newest `recent`, as `simplify` does: every dropped node lies within `tolerance` of the path through the nodes that
    stay. So a smooth, oversampled stream is kept in few nodes, and one that turns at every node is kept whole.

        path = cache.update(key, value, times)
        out = continuous_attention(query, path.key, path.value, path.mask, is_causal=True, times=path.times)

    Args:
        tolerance: largest distance, or one for keys and one for values, see `simplify`. 0 drops what lies on a line.
        recent: at least 1; this many of the newest nodes are kept as they came, and a window that is shorter sees
            exactly what it would see without the cache. After `drop_newest` the newest nodes are older ones, which may
            have been thinned out.

    It holds one layer, and no gradient flows through it: what it stores is detached. Batch elements keep different
    numbers of nodes, so the path is padded on the left.
    """

    def __init__(self, tolerance: float | tuple[float, float], *, recent: int = 64) -> None:
        self.tolerances = _check_tolerance(tolerance)
        check_integer("recent", recent, 1)
        self.recent = int(recent)
        self.seen = 0
        """Nodes that arrived so far."""
        self._room: Path | None = None  # with space for more nodes behind `_end`
        self._end = 0
        self._settled = 0  # the nodes before this one were simplified; it is the last of them itself

    @property
    def path(self) -> Path | None:
        """What is in the cache, None at first."""
        return None if self._room is None else self._first(self._room, self._end)

    def update(self, key: Tensor, value: Tensor, times: Tensor | None = None) -> Path:
        """Append nodes, and return the whole path.

        Args:
            key: (B, Hkv, n, D), n ≥ 0 new nodes.
            value: (B, Hkv, n, Dv).
            times: (n,) or (B, n), not before the last ones; where None, one unit after another from the last node on.

        Returns:
            The path so far, padded on the left; the new nodes are the last n. It is a view that the next update may
            overwrite.

        Raises:
            ValueError, TypeError: a shape, dtype or meaning is wrong; the cache is then as it was.
        """
        times = self._check(key, value, times)
        key, value = key.detach(), value.detach()
        new = key.shape[2]
        if self._end - self._settled >= 2 * self.recent:
            self._settle()
        if self._room is None or self._end + new > self._room.times.shape[1]:
            self._grow(key, value, times, self._end + new + 2 * self.recent)
        room = self._room
        assert room is not None
        here = slice(self._end, self._end + new)
        with torch.no_grad():
            room.key[:, :, here], room.value[:, :, here] = key, value
            room.times[:, here], room.present[:, here] = times, True
        self._end += new
        self.seen += new
        return self._first(room, self._end)

    def next_times(self, key: Tensor) -> Tensor:
        """The times (n,) or (B, n) of new nodes (B, Hkv, n, D) that come one unit after another."""
        path = self.path
        if path is not None:
            self._check_fits("key", key, path.key)
        steps = torch.arange(key.shape[2], device=key.device, dtype=torch.float64 if path is None else path.times.dtype)
        return steps if path is None or path.times.shape[1] == 0 else path.times[:, -1:] + 1 + steps

    def _check(self, key: Tensor, value: Tensor, times: Tensor | None) -> Tensor:
        """The times (B, n) of what arrives."""
        path = self.path
        _check_key_value(key, value)
        if path is not None:
            self._check_fits("key", key, path.key)
            self._check_fits("value", value, path.value)
        times, _ = _check_nodes(key, self.next_times(key) if times is None else times, None)
        times = times.detach()
        if path is None:
            return times
        check_tensor("times", times, (path.times.dtype,), path.times.device)
        last = path.times[:, -1:]
        if last.shape[1] and times.shape[1] and bool((times[:, :1] < last).any()):
            row = int((times[:, :1] < last).any(-1).nonzero()[0])
            raise ValueError(
                f"times must not decrease, got {times[row, 0].item()!r} after {last[row, 0].item()!r} in the cache"
            )
        return times

    @staticmethod
    def _check_fits(name: str, new: Tensor, held: Tensor) -> None:
        """All but the number of nodes (B, Hkv, n, D) is as in the cache."""
        wanted = (*held.shape[:2], new.shape[2], held.shape[3])
        check_shape(name, new, [wanted], "of what the cache holds but for the new nodes")
        check_tensor(name, new, (held.dtype,), held.device)

    def drop_newest(self, count: int) -> None:
        """Forget the newest `count` nodes, those of the last update for one, as far as none of them was thinned out.

        Raises:
            ValueError: they were thinned out already, or never came.
            TypeError: the count isn't an int.
        """
        if not is_integer(count):
            raise TypeError(f"count must be an int, got {type(count).__name__}")
        newest = self._end - self._settled - (self._settled > 0)
        if not 0 <= count <= newest:
            raise ValueError(f"count must be from 0 to {newest}, the nodes that weren't thinned out yet, got {count}")
        self._end -= count
        self.seen -= count
        if self.seen == 0:
            self._room = None
        if self._room is not None:
            self._room.present[:, self._end :] = False

    @staticmethod
    def _first(path: Path, length: int) -> Path:
        key, value, times, present = path
        return Path(key[:, :, :length], value[:, :, :length], times[:, :length], present[:, :length])

    def _settle(self) -> None:
        """Simplify the nodes from the last settled one to the `recent` newest, and close up."""
        path = self.path
        assert path is not None
        key, value, times, present = path
        nodes = torch.arange(self._end, device=key.device)
        newest = nodes >= self._end - self.recent
        stretch = (nodes >= self._settled) & (nodes <= self._end - self.recent) & present
        simplified = _kept(key, value, times, stretch, self.tolerances)
        kept = present & (simplified | newest | (nodes <= self._settled))
        # To the right, so that the newest nodes stay in line; padding comes first.
        longest = int(kept.sum(-1).max()) if len(kept) else self.recent
        order = kept.to(torch.int8).argsort(dim=-1, stable=True)[:, self._end - longest :]
        with torch.inference_mode(False):  # as in `_grow`
            self._room = _gather(key, value, times, kept, order)
        self._end = order.shape[1]
        self._settled = self._end - self.recent

    def _grow(self, key: Tensor, value: Tensor, times: Tensor, length: int) -> None:
        """Make room for at least this many nodes."""
        held = self.path
        batch, heads, _, dim = key.shape
        length = max(length, 0 if held is None else self._end * 3 // 2)
        with torch.inference_mode(False):  # so that the next update may write in any mode
            room = Path(
                torch.zeros(batch, heads, length, dim, dtype=key.dtype, device=key.device),
                torch.zeros(batch, heads, length, value.shape[3], dtype=value.dtype, device=key.device),
                torch.zeros(batch, length, dtype=times.dtype, device=key.device),
                torch.zeros(batch, length, dtype=torch.bool, device=key.device),
            )
        if held is not None:
            for new, old in zip(self._first(room, self._end), held, strict=True):
                new.copy_(old)
        self._room = room
