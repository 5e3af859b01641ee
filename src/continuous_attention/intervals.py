"""Which nodes a query sees: causality, windows, padding, documents and masks as one interval [lo, hi) per query.

Shape legend: B batch (1 where all batch elements agree), Lq queries (1 where all queries agree), Lk nodes.
Intervals are int64 tensors (B, Lq, 2); an interval with hi <= lo is empty. `position` (B, Lq) is the index of the
node that a query stands on.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

WHY_NO_BIAS = "a bias can't cut the path, because the weight beside a masked node decays like 1/|bias| and leaks"


def everything(key_length: int, device: torch.device) -> Tensor:
    """Every query sees every node: [0, Lk), shape (1, 1, 2)."""
    return torch.tensor([[[0, key_length]]], device=device)


def standing(query_length: int, key_length: int, device: torch.device) -> Tensor:
    """Bottom-right alignment: query j stands on node Lk − Lq + j; shape (1, Lq)."""
    return (torch.arange(query_length, device=device) + (key_length - query_length))[None]


def around(position: Tensor, left: int | None, right: int | None) -> Tensor:
    """The nodes from `left` before to `right` after a position; None is without limit."""
    lo = torch.zeros_like(position) if left is None else position - left
    hi = torch.full_like(position, torch.iinfo(position.dtype).max) if right is None else position + right + 1
    return torch.stack([lo, hi], dim=-1)


def intersect(first: Tensor, *others: Tensor) -> Tensor:
    """The nodes in all of the given intervals, broadcasting over the batch."""
    lo, hi = first.unbind(-1)
    for other in others:
        lo = torch.maximum(lo, other[..., 0])
        hi = torch.minimum(hi, other[..., 1])
    return torch.stack([lo, hi], dim=-1)


def of_documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, queries: int | Tensor) -> tuple[Tensor, Tensor]:
    """Packed documents: each query sees its own document's nodes.

    Args:
        cu_seqlens_q: (documents + 1,), where each document's queries begin, and the total number of queries.
        cu_seqlens_k: (documents + 1,), the same for the nodes.
        queries: the total number of queries, Lq, or the numbers (Lq,) of those that are asked for.

    Returns:
        intervals (1, Lq, 2), and positions (1, Lq) aligned bottom-right within each document.
    """
    if isinstance(queries, int):
        queries = torch.arange(queries, device=cu_seqlens_q.device)
    ends_q, ends_k = cu_seqlens_q[1:].long(), cu_seqlens_k[1:].long()
    document = torch.searchsorted(ends_q, queries, right=True)
    hi = ends_k[document]
    intervals = torch.stack([cu_seqlens_k.long()[document], hi], dim=-1)
    return intervals[None], (hi - ends_q[document] + queries)[None]


def of_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """A boolean mask (…, Lq, Lk), True = visible, as intervals from the first to the last visible node.

    Returns:
        intervals (…, Lq, 2), and a boolean scalar: no row has a gap, so the intervals say all that the mask says.
    """
    key_length = mask.shape[-1]
    if key_length == 0:
        return mask.new_zeros((*mask.shape[:-1], 2), dtype=torch.int64), mask.new_ones(())
    count = mask.sum(-1)
    lo = mask.int().argmax(-1)
    hi = torch.where(count > 0, key_length - mask.flip(-1).int().argmax(-1), lo)
    return torch.stack([lo, hi], dim=-1), (hi - lo == count).all()


def of_additive(name: str, mask: Tensor) -> Tensor:
    """An additive mask of 0 and −inf (or the dtype's lowest number) as a boolean one, True = visible.

    Raises:
        NotImplementedError: the mask called `name` has other values.
    """
    visible = mask == 0
    if not holds(visible | (mask <= torch.finfo(mask.dtype).min)):
        raise NotImplementedError(f"{name} has values other than 0 and −inf: {WHY_NO_BIAS}")
    return visible


def readable(x: Tensor) -> bool:
    """Whether Python may read the tensor's values: not on the meta device, nor while torch compiles."""
    return not (torch.compiler.is_compiling() or x.is_meta)


def holds(condition: Tensor) -> bool:
    """Whether a condition is true everywhere, or its values can't be read."""
    return not readable(condition) or bool(condition.all())


def at(times: Tensor, position: Tensor) -> Tensor:
    """The times (…, Lk) of the nodes at the positions (…, Lq), broadcasting; positions outside are moved inside."""
    if times.shape[-1] == 0:
        return times.new_zeros(()).expand(position.shape)
    shape = torch.broadcast_shapes(times.shape[:-1], position.shape[:-1])
    index = position.clamp(0, times.shape[-1] - 1).expand(*shape, -1)
    return times.expand(*shape, -1).gather(-1, index)


def bisect(times: Tensor, intervals: Tensor, bound: Tensor, *, right: bool) -> Tensor:
    """Index in [lo, hi] of the first node of the interval with τ > bound (`right`) or τ >= bound.

    Like `torch.searchsorted`, but within each query's own interval: times outside of it, of padding or of another
    document, are never read.

    Args:
        times: (B, Lk), non-decreasing inside each interval.
        intervals: (B, Lq, 2).
        bound: (B, Lq), in the unit of `times`.
        right: also skip the nodes that equal the bound.
    """
    lo, hi, bound = torch.broadcast_tensors(*intervals.unbind(-1), bound)
    hi = torch.maximum(lo, hi)
    for _ in range(times.shape[-1].bit_length()):
        middle = torch.div(lo + hi, 2, rounding_mode="floor")
        time = at(times, middle)
        before = (time <= bound if right else time < bound) & (lo < hi)
        lo, hi = torch.where(before, middle + 1, lo), torch.where(before, hi, middle)
    return lo


def covered_nodes(intervals: Tensor, key_length: int) -> Tensor:
    """The nodes (B, Lk) that at least one query sees, in memory proportional to Lq + Lk."""
    lo, hi = intervals.clamp(0, key_length).unbind(-1)
    hi = torch.maximum(lo, hi)
    steps = torch.zeros(lo.shape[0], key_length + 1, dtype=torch.int64, device=lo.device)
    steps.scatter_add_(-1, lo, torch.ones_like(lo)).scatter_add_(-1, hi, -torch.ones_like(hi))
    return steps.cumsum(-1)[:, :-1] > 0


def visible_nodes(intervals: Tensor, key_length: int) -> Tensor:
    """The boolean mask (…, Lq, Lk) of the intervals (…, Lq, 2)."""
    nodes = torch.arange(key_length, device=intervals.device)
    return (nodes >= intervals[..., :1]) & (nodes < intervals[..., 1:])


def segment_lengths(times: Tensor, seen: Tensor) -> Tensor:
    """The length of the segment that ends at each node, 0 where no query sees it; shape (B or 1, Lk)."""
    lengths = F.pad(times.diff(dim=-1), (1, 0))
    return torch.where(used_segments(seen, times.shape[-1]), lengths, 0.0)


def used_segments(seen: Tensor, key_length: int) -> Tensor:
    """Which segments, named by the node they end at, have both their nodes in some query's interval; (B or 1, Lk)."""
    return covered_nodes(seen + seen.new_tensor([1, 0]), key_length)
