"""Sequences longer than one device: nodes and queries spread over the ranks of a process group.

The integral is additive, so every rank integrates its queries over one rank's nodes after the other and merges the
results by log-sum-exp. Nodes travel in blocks, one per rank. Each run of nodes in a block brings a halo: the node
before its first one, because the segment between two runs belongs to the later one. What a query sees is resolved to
[lo, hi) of the whole sequence by the same code as in one process; the boundary belongs to the run with the query's
first visible node, the end mass to the run with its last one.

Backward, the blocks travel once more. With the whole domain's normalizer and output each run's gradient is its own
part of the whole one (docs/math.md §6), so nothing of the forward pass is computed again but the scores.

Shape legend: B batch, Hq query heads, Hkv key/value heads, Lq queries and Lk nodes of this rank, D and Dv head dims.
Of all ranks together there are ΣLq queries and ΣLk nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from continuous_attention import functional, ops, reference
from continuous_attention import intervals as iv
from continuous_attention.checks import (
    check_choice,
    check_documents,
    check_flag,
    check_qkv,
    check_times,
    dtype_name,
    unify_dtypes,
)
from continuous_attention.ranks import (
    PLACEMENTS,
    Homeward,
    Journey,
    Team,
    attempt,
    differentiable_once,
    first_of,
    gather_runs,
    halos_of,
    numbers_of,
    runs_of,
    tie_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SCHEDULES = ("ring", "all-gather")


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    schedule: str = "ring",
    placement: str = "contiguous",
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
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    softcap: float | None = None,
    rule: str = "exact",
    return_lse: bool = False,
    backend: str | None = None,
    reduce_boundary: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """`continuous_attention` of a sequence whose queries and nodes are spread over the ranks of a group.

        o = Σ_j e^{lse_j − lse} o_j        lse = log Σ_j e^{lse_j}        j: the ranks' stretches of the path

    Every rank of the group calls it with its own part of the sequence and gets its own queries' part of what
    `continuous_attention` gives of the whole. Tensors with a length have this rank's part of it, as `shard_sequence`
    cuts it; the numbers of nodes that stand in them are those of the whole sequence. Memory grows with the rank's own
    length ("ring"), or with the whole length of keys and values ("all-gather"), never with the scores where the fused
    kernels run. Bitwise repeatable on CPUs, and the same for both schedules: the partial results, merged in float32
    (float64 for float64), come in a fixed order.

    Every rank must also run the backward pass where any does, since it communicates. Gradients can't be differentiated
    again. Code that torch.compile compiles must call `torch.compiler.disable(context_parallel_attention)`.

    Args:
        query: (B, Hq, Lq, D), float16, bfloat16, float32 or float64.
        key: (B, Hkv, Lk, D), dtype of the query.
        value: (B, Hkv, Lk, Dv), dtype of the query.
        group: a process group, or a device mesh with one dim; None for all processes.
        schedule: "ring": blocks of keys and values go from rank to rank, the next one while this one is worked on, and
            each as far as a query sees it. "all-gather": all of them come at once, with fewer and larger messages,
            which is better for few key/value heads and short sequences. docs/scale.md says from where on.
        placement: "contiguous": each rank has one run of nodes, in the order of the ranks, of any length, 0 included.
            "zigzag": rank r of n has the runs r and 2n − 1 − r of 2n, one behind the other, so that causal queries are
            as much work on every rank; the first one has half of the rank's nodes, rounded up. The same for queries.
        is_causal: query j of the whole sequence stands on node ΣLk − ΣLq + j and sees the nodes up to it; with
            `query_times` as in `continuous_attention`.
        scale: factor of the scores, 1/√D by default.
        enable_gqa: allow Hq to be a multiple of Hkv.
        boundary: where the path begins, "zero", "repeat", "half", "none" or (k0, v0), the same on every rank.
        times: (Lk,) or (B, Lk) of this rank's nodes, float32 or float64, non-decreasing over the whole sequence. They
            are gathered, and differences taken in their dtype. Each rank gets its own times' whole gradient.
        query_times: (Lq,) or (B, Lq) of this rank's queries.
        start_length: length of the segment before the first visible node.
        window: number of nodes seen, or (left, right), as in `continuous_attention`.
        time_window: only nodes with τ_i ≥ τ_q − time_window are seen.
        intervals: int32 or int64 (B or 1, Lq, 2): the nodes [lo, hi) of the whole sequence that each query sees.
        cu_seqlens_q: int32 or int64 (documents + 1,), 0 and the ends of packed documents among all ΣLq queries, the
            same on every rank; documents may cross from rank to rank. For flash-attn's layout take B = 1.
        cu_seqlens_k: the same for the nodes; that of the queries where None.
        softcap: bound of the scores, see `continuous_attention`.
        rule: "exact", "trapezoid" or "rectangle".
        return_lse: also return lse (B, Hq, Lq).
        backend: "reference", "cpu", "triton" or None, as in `continuous_attention`.
        reduce_boundary: give every rank the whole gradient of (k0, v0). False where something sums or averages the
            gradients of parameters over the ranks anyway, as DDP and FSDP do: then it's that of the rank's queries.

    Returns:
        out (B, Hq, Lq, Dv), or (out, lse), of this rank's queries.

    Raises:
        ValueError: a shape, device or meaning is wrong, or the ranks disagree about one.
        TypeError: a type or dtype is wrong.
        NotImplementedError: this can't be done.
        Whatever is wrong on some rank raises on all ranks of the group, with the argument and the ranks in the message:
        before anything else the ranks exchange a few numbers, in every call, since a rank can't know whether others
        changed theirs. A rank that never calls is noticed after the group's timeout.

    Source: docs/math.md, and docs/scale.md for what it costs.
    """
    team = Team(group)
    asked: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "boundary": boundary,
        "start_length": start_length,
        "window": window,
        "time_window": time_window,
        "softcap": softcap,
        "rule": rule,
        "backend": backend,
    }

    def check() -> tuple[list[Tensor], dict[str, object]]:
        names = ("query", "key", "value")
        check_qkv(query, key, value, names, "B, heads, length, head dim")
        check_choice("schedule", schedule, SCHEDULES)
        check_choice("placement", placement, PLACEMENTS)
        check_flag("return_lse", return_lse)
        check_flag("reduce_boundary", reduce_boundary)
        if rule == "taylor":
            raise NotImplementedError(
                "rule='taylor' can't be spread over ranks: its weights aren't sums over segments, so pieces don't merge"
            )
        tensors = unify_dtypes(names, query, key, value)
        check_times("times", times, len(key), key.shape[2], key.device)
        facts = _facts(tensors, times, query_times, intervals, (cu_seqlens_q, cu_seqlens_k), asked)
        facts |= {"schedule": schedule, "placement": placement}
        facts |= {"return_lse": return_lse, "reduce_boundary": reduce_boundary}
        return tensors, facts

    checked, error = attempt(check)
    tensors, facts = ([], {}) if checked is None else checked
    lengths = team.agree(facts, [tensors[0].shape[2], tensors[1].shape[2]] if tensors else [0, 0], error)
    query, key, value = tensors
    query_runs, runs = (runs_of([of_rank[i] for of_rank in lengths], placement) for i in (0, 1))
    all_times = None if times is None else gather_runs(times, -1, team, runs)

    def resolve() -> tuple[functional.Call, list[list[_Part]]]:
        own = numbers_of(query_runs[team.rank], query.device)
        total_q, total_k = (sum(of_rank[i] for of_rank in lengths) for i in (0, 1))
        what: dict[str, Any] = {"seen": iv.everything(total_k, query.device), "position": own[None] + total_k - total_q}
        if cu_seqlens_q is not None:
            of_nodes = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
            check_documents(cu_seqlens_q, of_nodes, (total_q, total_k), query.device)
            what["seen"], what["position"] = iv.of_documents(cu_seqlens_q, of_nodes, own)
            what["origin"] = what["seen"][..., 0]
        elif cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k needs cu_seqlens_q, got cu_seqlens_q=None")
        # Tensors of the whole length that take no memory.
        whole = [x.detach().new_zeros(()).expand(*x.shape[:2], total_k, x.shape[3]) for x in (key, value)]
        call = functional.resolve_batch(
            query,
            *whole,
            **what,
            times=all_times,
            query_times=query_times,
            intervals=intervals,
            interpolation="linear",
            return_lse=True,
            **asked,
        )
        seen = call.seen.clamp(0, total_k).expand(-1, query.shape[2], -1)
        return call._replace(seen=seen), _parts(seen, runs)

    resolved, error = attempt(resolve)
    parts = [[] for _ in runs] if resolved is None else resolved[1]
    steps = [(team.rank - rank) % team.size if parts[rank] else 0 for rank in range(team.size)]
    reach = team.highest(steps, error)
    assert resolved is not None
    call = resolved[0]
    start_key, start_value = call.arguments["start_node"] or (None, None)
    end_length = call.arguments["end_length"]
    ends = end_length if isinstance(end_length, Tensor) else None
    shape = (len(key), key.shape[1], key.shape[3], value.shape[3])
    per_node = shape[0] * shape[1] * (shape[2] + shape[3])
    sizes = [per_node * sum(run.stop - first_of(run) for run in own) for own in runs]
    plan = _Plan(
        journey=Journey(team, sizes, reach, schedule == "all-gather"),
        reduces_boundary=reduce_boundary,
        runs=runs,
        parts=parts,
        seen=call.seen,
        shape=shape,
        engine=reference if call.kernels is None else ops,
        scale=call.arguments["scale"],
        start_length=call.arguments["start_length"],
        end_length=0.0 if isinstance(end_length, Tensor) else end_length,
        others={"rule": call.rule, "softcap": call.softcap} if call.kernels is None else {"kernels": call.kernels},
    )
    leaves = query, key, value, start_key, start_value, call.arguments["lengths"], ends
    out, lse = _ContextParallel.apply(*leaves, tie_of(*leaves), plan)
    return (out, lse) if return_lse else out


def _facts(
    tensors: list[Tensor],
    times: Any,
    query_times: Any,
    intervals: Any,
    cu_seqlens: tuple[Any, Any],
    asked: dict[str, Any],
) -> dict[str, object]:
    """What must be the same on every rank, by the name of the argument."""
    query, key, value = tensors

    def kind(x: Any) -> object:
        """A tensor without its length and what stands in it."""
        if not isinstance(x, Tensor):
            return x
        return f"{dtype_name(x.dtype)}, {x.ndim} dims, requires_grad={torch.is_grad_enabled() and x.requires_grad}"

    facts: dict[str, object] = {
        "the query's (B, Hq, D)": (*query.shape[:2], query.shape[3]),
        "the key's (B, Hkv, D)": (*key.shape[:2], key.shape[3]),
        "the value's (B, Hkv, Dv)": (*value.shape[:2], value.shape[3]),
        "the device of query, key and value": query.device.type,
        **{name: kind(x) for name, x in zip(("query", "key", "value"), tensors, strict=True)},
        "times": kind(times),
        "query_times": kind(query_times),
        "whether intervals are given": intervals is not None,
    }
    for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True):
        facts[name] = x.tolist() if isinstance(x, Tensor) else x
    for name, x in asked.items():
        facts[name] = tuple(map(kind, x)) if isinstance(x, Sequence) and not isinstance(x, str) else x
    return facts


# ---- Who has which nodes, and which queries see them


class _Part(NamedTuple):
    """What a back end does at once: some of this rank's queries, along one run of a block.

    The queries are those whose path begins in the run (`begins`), or those whose path comes from before.
    """

    rows: slice
    run: range
    offset: int  # of the run, its halo included, in the block
    begins: bool

    @property
    def nodes(self) -> slice:
        return slice(self.offset, self.offset + self.run.stop - first_of(self.run))


def _parts(seen: Tensor, runs: list[list[range]]) -> list[list[_Part]]:
    """The parts of each rank's block that some query of this rank sees; seen (B or 1, Lq, 2)."""
    lo, hi = seen.unbind(-1)
    parts: list[list[_Part]] = [[] for _ in runs]
    if not seen.shape[1]:
        return parts
    flat = [run for own in runs for run in own]
    ends = torch.tensor([[run.start, run.stop] for run in flat], device=seen.device)
    start, stop = ends[:, :, None, None].unbind(1)
    sees = (lo < hi) & (lo < stop) & (hi > start) & (start < stop)
    hulls = [_hull((sees & begins).any(1)) for begins in (lo >= start, lo < start)]
    table = torch.stack(hulls, dim=1).tolist()
    for rank, own in enumerate(runs):
        offset = 0
        for i, run in enumerate(own, start=rank * len(own)):
            for begins, (first, last) in zip((True, False), table[i], strict=True):
                if first < last:
                    parts[rank].append(_Part(slice(first, last), flat[i], offset, begins))
            offset += run.stop - first_of(run)
    return parts


def _hull(chosen: Tensor) -> Tensor:
    """The first and the end of what is chosen along the last dim, (0, 0) for nothing."""
    number = chosen.to(torch.uint8)
    ends = torch.stack([number.argmax(-1), chosen.shape[-1] - number.flip(-1).argmax(-1)], dim=-1)
    return torch.where(chosen.any(-1, keepdim=True), ends, 0)


class _Plan(NamedTuple):
    """What one call does, without the tensors that have gradients."""

    journey: Journey
    reduces_boundary: bool
    runs: list[list[range]]  # of each rank's nodes
    parts: list[list[_Part]]  # of each rank's block
    seen: Tensor  # (B or 1, Lq, 2)
    shape: tuple[int, int, int, int]  # (B, Hkv, D, Dv)
    engine: Any  # ops or reference
    scale: float
    start_length: float
    end_length: float
    others: dict[str, Any]

    def stretch(
        self, part: _Part, start: tuple[Tensor, Tensor] | None, lengths: Tensor | None, ends: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Which of the part's queries end in it (B or 1, 1, rows), and what the back end is given after the nodes."""
        lo, hi = self.seen[:, part.rows].unbind(-1)
        run, first = part.run, first_of(part.run)
        sees = (lo < hi) & (lo < run.stop) & (hi > run.start) & ((lo >= run.start) == part.begins)
        clipped = torch.stack([lo.clamp(min=first), hi.clamp(max=run.stop)], dim=-1) - first
        ending = (sees & (hi <= run.stop)).unsqueeze(1)
        end_length: float | Tensor = 0.0
        if ends is not None:
            end_length = torch.where(ending, ends[..., part.rows], 0.0)
        elif self.end_length:
            end_length = ending.double() * self.end_length
        return ending, {
            "intervals": torch.where(sees.unsqueeze(-1), clipped, 0),
            "scale": self.scale,
            "lengths": None if lengths is None else lengths[:, first : run.stop],
            "start_node": start if part.begins else None,
            "start_length": self.start_length if part.begins else 0.0,
            "end_length": end_length,
            **self.others,
        }

    def split(self, block: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Keys (B, Hkv, nodes, D) and values (B, Hkv, nodes, Dv) of a rank's block, which has one dim or isn't here."""
        batch, heads, dim, value_dim = self.shape
        is_here = len(block) == self.journey.sizes[rank]
        nodes = sum(run.stop - first_of(run) for run in self.runs[rank]) if is_here else 0
        keys, values = block.split([batch * heads * nodes * dim, batch * heads * nodes * value_dim])
        return keys.view(batch, heads, nodes, dim), values.view(batch, heads, nodes, value_dim)


def _pack(plan: _Plan, key: Tensor, value: Tensor) -> Tensor:
    """This rank's block: its nodes, each run behind its halo; first all keys, then all values, in one dim."""
    rank = plan.journey.team.rank
    nodes = torch.cat([key, value], dim=-1)
    runs = nodes.split([len(run) for run in plan.runs[rank]], dim=2)
    before: dict[int, Tensor] = {}
    sent, received = [], []
    for (to, run), (origin, of_origin) in halos_of(plan.runs):
        if origin == rank:
            halo = runs[of_origin][:, :, -1:].contiguous()
            if to == rank:
                before[run] = halo
            else:
                sent.append((halo, to))
        elif to == rank:
            before[run] = nodes.new_empty((*nodes.shape[:2], 1, nodes.shape[3]))
            received.append((before[run], origin))
    for work in plan.journey.team.exchange(sent, received):
        work.wait()
    block = torch.cat([x for i, run in enumerate(runs) for x in (before.get(i), run) if x is not None], dim=2)
    keys, values = block.split([key.shape[3], value.shape[3]], dim=-1)
    return torch.cat([keys.reshape(-1), values.reshape(-1)])


def _unpack_gradients(plan: _Plan, block: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's keys and values, from those of its block and of its nodes in others' halos."""
    rank = plan.journey.team.rank
    nodes = torch.cat(plan.split(block, rank), dim=-1)
    places = [run.stop - first_of(run) for run in plan.runs[rank]]
    behind_halos = nodes.split(places, dim=2)
    runs = [x[:, :, run.start - first_of(run) :] for x, run in zip(behind_halos, plan.runs[rank], strict=True)]
    sent, received, returned = [], [], []
    for (of_halo, run), (origin, of_origin) in halos_of(plan.runs):
        if rank not in (of_halo, origin):
            continue
        is_here = of_halo == rank
        halo = behind_halos[run][:, :, :1].contiguous() if is_here else torch.empty_like(nodes[:, :, :1])
        if is_here and origin != rank:
            sent.append((halo, origin))
        elif not is_here:
            received.append((halo, of_halo))
        if origin == rank:
            returned.append((of_origin, halo))
    for work in plan.journey.team.exchange(sent, received):
        work.wait()
    for run, halo in returned:
        runs[run][:, :, -1:] += halo
    key, value = torch.cat(runs, dim=2).split(list(plan.shape[2:]), dim=-1)
    return key, value


# ---- The attention


class _Merged:
    """The integrals over the stretches so far: Σ_j w_j o_j and Σ_j w_j, relative to BASE^reference."""

    def __init__(self, query: Tensor, value_dim: int, base: float) -> None:
        dtype = reference.accumulation_dtype(query.dtype)
        self.log_base = math.log(base)
        self.sums = query.new_zeros((*query.shape[:3], value_dim), dtype=dtype)
        self.total = query.new_zeros(query.shape[:3], dtype=dtype)
        self.reference = torch.full_like(self.total, -math.inf)

    def add(self, rows: slice, ending: Tensor, out: Tensor, reference: Tensor, total: Tensor) -> None:
        """Add a stretch; where it has no length its out counts if the query's path ends in it and has none either."""
        no_length = total == 0
        reference = reference.masked_fill(no_length, -math.inf)
        before = self.reference[:, :, rows]
        peak = torch.maximum(before, reference)
        unset = peak == -math.inf
        peak_or_zero = peak.masked_fill(unset, 0.0)
        old, new = (((x - peak_or_zero) * self.log_base).exp().masked_fill(unset, 1.0) for x in (before, reference))
        weight = torch.where(no_length, ending.to(total.dtype), total) * new
        self.sums[:, :, rows] = self.sums[:, :, rows] * old.unsqueeze(-1) + out * weight.unsqueeze(-1)
        self.total[:, :, rows] = self.total[:, :, rows] * old + total * new
        self.reference[:, :, rows] = peak

    def finish(self) -> tuple[Tensor, Tensor]:
        """out and lse; from then on the reference is finite where there's no length."""
        no_length = self.total == 0
        total = self.total.masked_fill(no_length, 1.0)
        # In float64, since the reference may be large and the rest of the sum small.
        lse = (self.reference.double() * self.log_base + total.double().log()).to(total.dtype)
        self.reference = self.reference.masked_fill(no_length, 0.0)
        return self.sums / total.unsqueeze(-1), lse.masked_fill(no_length, -math.inf)


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        start_key: Tensor | None,
        start_value: Tensor | None,
        lengths: Tensor | None,
        ends: Tensor | None,
        tie: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        start = None if start_key is None or start_value is None else (start_key, start_value)
        own = _pack(plan, key, value)
        merged = _Merged(query, value.shape[3], plan.engine.BASE)
        for rank, block in plan.journey.visit(own):
            keys, values = plan.split(block, rank)
            for part in plan.parts[rank]:
                ending, how = plan.stretch(part, start, lengths, ends)
                nodes = query[:, :, part.rows], keys[:, :, part.nodes], values[:, :, part.nodes]
                merged.add(part.rows, ending, *plan.engine.integrate(*nodes, **how))
        exact, lse = merged.finish()
        out = exact.to(query.dtype)
        rest = None if out.dtype == exact.dtype else (exact - out).to(out.dtype)
        ctx.plan, ctx.tie = plan, tie
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            query, own, start_key, start_value, lengths, ends, out, rest, merged.reference, merged.total
        )
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, own, start_key, start_value, lengths, ends, out, rest, log_peak, total = ctx.saved_tensors
        plan: _Plan = ctx.plan
        _, of_key, of_value, of_start_key, of_start_value, *of_lengths_and_ends, _, _ = ctx.needs_input_grad
        wanted = (of_start_key or of_start_value, *of_lengths_and_ends)
        start = None if start_key is None else (start_key, start_value)
        out_gradient, lse_gradient = (
            torch.zeros_like(x) if given is None else given for x, given in zip((out, total), gradients, strict=True)
        )
        no_length = total == 0
        lse_gradient = lse_gradient.masked_fill(no_length, 0.0)

        inputs = (query, start_key, start_value, lengths, ends)
        sums = [None if x is None else torch.zeros_like(x, dtype=reference.accumulation_dtype(x.dtype)) for x in inputs]
        homeward = Homeward(plan.journey, total) if of_key or of_value else None
        for step, (rank, block) in enumerate(plan.journey.visit(own)):
            keys, values = plan.split(block, rank)
            of_block = torch.zeros_like(block, dtype=total.dtype)
            of_keys, of_values = plan.split(of_block, rank)
            for part in plan.parts[rank]:
                ending, how = plan.stretch(part, start, lengths, ends)
                rows, nodes = part.rows, part.nodes
                # Where the whole path has no length, only the last value has a gradient.
                silent = (no_length[:, :, rows] & ~ending).unsqueeze(-1)
                of_rows, of_nodes, of_node_values, *others = plan.engine.differentiate(
                    out_gradient[:, :, rows].masked_fill(silent, 0.0),
                    lse_gradient[:, :, rows],
                    out[:, :, rows],
                    None if rest is None else rest[:, :, rows],
                    log_peak[:, :, rows],
                    total[:, :, rows],
                    query[:, :, rows],
                    keys[:, :, nodes],
                    values[:, :, nodes],
                    wanted=wanted,
                    **how,
                )
                of_keys[:, :, nodes] += of_nodes
                of_values[:, :, nodes] += of_node_values
                of_length, of_k0, of_v0, of_end = others
                places = [(..., rows, slice(None)), ..., ..., (..., slice(first_of(part.run), part.run.stop))]
                places.append((..., rows))
                parts = of_rows, of_k0, of_v0, of_length, None if of_end is None else of_end.where(ending, 0.0)
                for into, place, x in zip(sums, places, parts, strict=True):
                    if into is not None and x is not None:
                        into[place] += x.sum_to_size(into[place].shape)
            if homeward is not None:
                homeward.put(step, of_block)
        of_nodes = (None, None) if homeward is None else _unpack_gradients(plan, homeward.finish())
        of_query, *of_start, of_lengths, of_ends = sums
        if wanted[0] and plan.reduces_boundary:
            for x in of_start:
                dist.all_reduce(x, group=plan.journey.team.group)
        found = (of_query, *of_nodes, *of_start, of_lengths, of_ends)
        dtypes = (query.dtype,) * 3 + tuple(None if x is None else x.dtype for x in inputs[1:])
        asked = zip(found, dtypes, ctx.needs_input_grad[:-2], strict=True)
        return (*(x.to(dtype) if x is not None and needed else None for x, dtype, needed in asked), None, None)
